#include "products.h"

const cpuchat::Products cpuchat::avx_vnni_products = cpuchat::all_products<cpuchat::AvxVnni>("AVX-VNNI");
