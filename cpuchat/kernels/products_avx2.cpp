#include "wide.h"

const cpuchat::Products cpuchat::avx2_products = cpuchat::all_with_wide<cpuchat::Avx2>("AVX2");
