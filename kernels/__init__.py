"""Triton kernels, each with a twin in torch. This package does not import ``spider``.

===================== ==========================================================================
``switch``            define ops and choose the implementation that they run
``expand_reduce``     copy each token's row to the rows of its experts, and sum them back into one
``get_fused_mapping`` lay out the rows of each expert, given the choices
``topk_gate``         the k experts with the largest scores
``normalize_weight``  divide a token's gates by their sum
``aux_fi``            each expert's load as a share of the mean
``router_logits``     logits of a router from a bfloat16 state, as exact as in float32
``route``             the whole router fused: scores, choice, gates, counts
``engram_hash``       the table rows of hashed byte n-grams
``engram_gate``       gate the values of Engram by the state
``engram_conv``       convolve the gated values over earlier rows, and add the result
``segment_sum``       sum runs of rows, and copy each sum back to the rows of its run
``embedding``         look up rows of a table, with a deterministic gradient
``cast_fp8``          cast rows or columns to fp8
``grouped_mm``        each expert's rows times its own matrix
``grouped_mm_fp8``    the same in fp8
===================== ==========================================================================

A file holds one op, or two that are each other's adjoint: the twin in torch, the kernels, their launch, and
last the op. ``<op>`` is registered with ``torch.library`` in the namespace ``spider``, with a fake kernel and
autograd, so ``torch.compile`` can trace it. ``<op>_torch`` is its twin of the same signature. The twin runs
on a CPU and is the reference for the kernel; its derivative by torch is the reference for the backward
kernel. Without Triton the package can be imported, and only the twins run.

Letters in names: N tokens, D features, E experts, K experts per token, P rows of the fused buffer, in which
the rows of an expert are contiguous. Each expert's segment is padded to a multiple of an alignment.
"""
