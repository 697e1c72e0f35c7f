"""Triton kernels for the mixture of experts, each with a torch twin; knows nothing of ``spider``.

===================== ==========================================================================
``switch``            what makes an op, and which implementation it runs
``expand_to_fused``   copy each token's row to the places of its experts, zeros in the padding
``reduce_fused``      sum a token's rows, weighted or not, back into one
``get_fused_mapping`` where each expert's rows lie, from the choices
``topk_gate``         the k experts with the largest scores
``normalize_weight``  divide a token's gates by their sum
``aux_fi``            each expert's load as a share of the mean
``route``             the whole router fused: scores, choice, gates, counts
``engram_hash``       the table rows of hashed byte n-grams
``engram_gate``       how much of an n-gram index each state takes
``engram_conv``       what those values make of the rows before, added to them
``segment_sum``       sums of runs of rows, and each run's row given back to all of it
``cast_fp8``          rows or columns to fp8
``grouped_mm_fp8``    each expert's rows times its own matrix, in fp8
===================== ==========================================================================

One op a file: its twin in torch, its kernels, their launch, and last the op itself. ``<op>`` is the op
registered with ``torch.library`` in the namespace ``spider`` (what tracing needs and autograd included, so
``torch.compile`` sees it), or names that op's results. ``<op>_torch`` is its twin of the same signature: the
path on a CPU, and what the kernel is compared with; its derivative by torch stands in for a backward kernel.
Without Triton the package imports, and only the twins run.

Letters in names: N tokens, D features, E experts, K experts a token, P rows of the fused buffer, in which the
rows of an expert are contiguous. Each expert's segment is padded to a multiple of an alignment.
"""
