#include "wide.h"

const cpuchat::Products cpuchat::avx512_products = cpuchat::all_with_wide<cpuchat::Avx512>("AVX-512 VNNI");
