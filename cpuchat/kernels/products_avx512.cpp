#include "products.h"

const cpuchat::Products cpuchat::avx512_products = cpuchat::all_products<cpuchat::Avx512>("AVX-512 VNNI");
