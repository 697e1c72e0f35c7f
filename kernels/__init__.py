"""Triton kernels, each with a twin in torch. This package does not import ``spider``.

===================== ===========================================================================
``switch``            Define ops and choose the implementation that they run.
``expand_reduce``     Copy each token's row to the rows of its experts, and sum them back into one.
``get_fused_mapping`` Lay out the rows of each expert, given the choices.
``topk_gate``         Choose the k experts with the largest scores.
``normalize_weight``  Divide a token's gates by their sum.
``aux_fi``            Compute each expert's load as a share of the mean.
``router_logits``     Compute the logits of a router from a bfloat16 state, as exact as in float32.
``route``             Compute the whole router: scores, choice, gates, counts, and the layout of the rows.
``engram_hash``       Compute the table rows of hashed byte n-grams.
``engram_gate``       Gate the values of Engram by the state.
``engram_conv``       Convolve the gated values over earlier rows, and add the result.
``segment_sum``       Sum runs of rows, and copy each sum back to the rows of its run.
``sum_tensors``       Sum several tensors in one pass.
``embedding``         Look up rows of a table, with a deterministic gradient.
``cast_fp8``          Cast rows or columns to fp8.
``grouped_mm``        Multiply each expert's rows by its own matrix.
``grouped_mm_fp8``    Do the same in fp8.
===================== ===========================================================================

A file holds one op, or two ops if each is the other's adjoint (the gradient of the other). In order it has
the twin in torch, the kernels, the functions that launch them, and the op. ``<op>`` is registered with
``torch.library`` in the namespace ``spider``, with a fake kernel and autograd, so ``torch.compile`` can trace
it. ``<op>_torch`` is its twin and has the same signature. It runs on a CPU and is the reference for the
kernel. torch's derivative of the twin is the reference for the backward kernel. Without Triton the package
can be imported, and only the twins run.

How to read a kernel. A launch ``kernel[grid](arguments)`` starts one program for each point of the grid. A
program finds its point by ``tl.program_id``. It loads a tile of a tensor from a pointer and offsets. A mask
excludes offsets beyond the tensor, because a tile's sizes are powers of two (``WIDE_D`` is D rounded up).

Letters in names give the axes of a tensor: N tokens, D features, E experts, K experts per token, P rows of
the fused buffer. In that buffer the rows of an expert are contiguous. Each expert's segment is padded to a
multiple of an alignment.
"""
