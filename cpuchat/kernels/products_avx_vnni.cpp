#include "wide.h"

const cpuchat::Products cpuchat::avx_vnni_products = cpuchat::all_with_wide<cpuchat::AvxVnni>("AVX-VNNI");
