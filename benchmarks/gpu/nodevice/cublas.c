/* cuBLAS without products: each call is counted under its shape, as `product M x N x K` (or `x COUNT` more).

   M, N and K are those of the call: 2 M N K floating-point operations, times the number of products in a
   batch. cuBLAS names by columns, so M and N are torch's the other way round. */
#include "nodevice.h"
/* cuBLAS's header wants the types of half precision, whose headers wheels of CUDA lack a part of. */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
typedef unsigned short __half, __nv_bfloat16;
typedef unsigned int __half2, __nv_bfloat162;
#include <cublas_v2.h>
#include <cublasLt.h>

#define FINE return CUBLAS_STATUS_SUCCESS

typedef struct {
    cudaStream_t stream;
} Handle;

static cublasStatus_t product(cudaStream_t stream, long m, long n, long k, long count) {
    char name[96];
    int length = snprintf(name, sizeof name, "product %ld x %ld x %ld", m, n, k);
    if (count != 1) snprintf(name + length, sizeof name - length, " x %ld", count);
    nodevice_named(name, stream);
    FINE;
}
#define STREAM (((Handle *)handle)->stream)

EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) { *handle = calloc(1, sizeof(Handle)); FINE; }
EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { free(handle); FINE; }
EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) { STREAM = stream; FINE; }
EXPORT cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *memory, size_t size) { FINE; }
EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) { FINE; }
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) { *mode = 0; FINE; }
EXPORT cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) { FINE; }
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) { *mode = 0; FINE; }

#define GEMM cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k
EXPORT cublasStatus_t cublasGemmEx(GEMM, const void *alpha, const void *A, cudaDataType At, int lda, const void *B, cudaDataType Bt, int ldb,
                                   const void *beta, void *C, cudaDataType Ct, int ldc, cublasComputeType_t type, cublasGemmAlgo_t algorithm) {
    return product(STREAM, m, n, k, 1);
}
EXPORT cublasStatus_t cublasSgemm_v2(GEMM, const float *alpha, const float *A, int lda, const float *B, int ldb, const float *beta, float *C, int ldc) {
    return product(STREAM, m, n, k, 1);
}
EXPORT cublasStatus_t cublasSgemmEx(GEMM, const float *alpha, const void *A, cudaDataType At, int lda, const void *B, cudaDataType Bt, int ldb,
                                    const float *beta, void *C, cudaDataType Ct, int ldc) {
    return product(STREAM, m, n, k, 1);
}
EXPORT cublasStatus_t cublasDgemm_v2(GEMM, const double *alpha, const double *A, int lda, const double *B, int ldb, const double *beta, double *C, int ldc) {
    return product(STREAM, m, n, k, 1);
}
EXPORT cublasStatus_t cublasGemmStridedBatchedEx(GEMM, const void *alpha, const void *A, cudaDataType At, int lda, long long sa, const void *B,
                                                 cudaDataType Bt, int ldb, long long sb, const void *beta, void *C, cudaDataType Ct, int ldc,
                                                 long long sc, int count, cublasComputeType_t type, cublasGemmAlgo_t algorithm) {
    return product(STREAM, m, n, k, count);
}
EXPORT cublasStatus_t cublasSgemmStridedBatched(GEMM, const float *alpha, const float *A, int lda, long long sa, const float *B, int ldb,
                                                long long sb, const float *beta, float *C, int ldc, long long sc, int count) {
    return product(STREAM, m, n, k, count);
}
EXPORT cublasStatus_t cublasSgemv_v2(cublasHandle_t handle, cublasOperation_t t, int m, int n, const float *alpha, const float *A, int lda,
                                     const float *x, int incx, const float *beta, float *y, int incy) {
    return product(STREAM, m, 1, n, 1);
}
EXPORT cublasStatus_t cublasDgemv_v2(cublasHandle_t handle, cublasOperation_t t, int m, int n, const double *alpha, const double *A, int lda,
                                     const double *x, int incx, const double *beta, double *y, int incy) {
    return product(STREAM, m, 1, n, 1);
}
EXPORT cublasStatus_t cublasDgemmStridedBatched(GEMM, const double *alpha, const double *A, int lda, long long sa, const double *B, int ldb,
                                                long long sb, const double *beta, double *C, int ldc, long long sc, int count) {
    return product(STREAM, m, n, k, count);
}
EXPORT cublasStatus_t cublasDdot_v2(cublasHandle_t handle, int n, const double *x, int incx, const double *y, int incy, double *result) {
    return product(STREAM, 1, 1, n, 1);
}
EXPORT cublasStatus_t cublasSdot_v2(cublasHandle_t handle, int n, const float *x, int incx, const float *y, int incy, float *result) {
    return product(STREAM, 1, 1, n, 1);
}
EXPORT cublasStatus_t cublasDotEx(cublasHandle_t handle, int n, const void *x, cudaDataType xt, int incx, const void *y, cudaDataType yt,
                                  int incy, void *result, cudaDataType rt, cudaDataType et) {
    return product(STREAM, 1, 1, n, 1);
}

/* cublasLt describes products by objects. Of a layout the rows, columns and the size of a batch are kept, of a
   product whether A is transposed. */
typedef struct {
    long rows, columns, count;
} Layout;
typedef struct {
    int transposed;
} Product;

EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { *handle = calloc(1, 64); FINE; }
EXPORT size_t cublasLtGetVersion(void) { return 130100; }
EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *description, cublasComputeType_t compute, cudaDataType_t scale) {
    *description = calloc(1, sizeof(Product));
    FINE;
}
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) { free(description); FINE; }
EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t size) {
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) ((Product *)description)->transposed = *(const int *)value;
    FINE;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows, uint64_t columns, int64_t ld) {
    Layout *made = malloc(sizeof *made);
    *made = (Layout){rows, columns, 1};
    *layout = (cublasLtMatrixLayout_t)made;
    FINE;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { free(layout); FINE; }
EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t size) {
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) ((Layout *)layout)->count = *(const int *)value;
    FINE;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) { *preference = malloc(256); FINE; }
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { free(preference); FINE; }
EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t size) { FINE; }
EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t A, cublasLtMatrixLayout_t B,
                                                     cublasLtMatrixLayout_t C, cublasLtMatrixLayout_t D, cublasLtMatmulPreference_t preference, int wanted,
                                                     cublasLtMatmulHeuristicResult_t results[], int *found) {
    memset(results, 0, sizeof *results);
    *found = 1;
    FINE;
}
EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void *alpha, const void *A, cublasLtMatrixLayout_t a,
                                     const void *B, cublasLtMatrixLayout_t b, const void *beta, const void *C, cublasLtMatrixLayout_t c, void *D,
                                     cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t size, cudaStream_t stream) {
    const Layout *left = (const Layout *)a, *out = (const Layout *)d;
    long k = ((Product *)description)->transposed ? left->rows : left->columns;
    return product(stream, out->rows, out->columns, k, out->count);
}
