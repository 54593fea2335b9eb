#include "products.h"

const cpuchat::Products cpuchat::avx2_products = cpuchat::all_products<cpuchat::Avx2>("AVX2");
