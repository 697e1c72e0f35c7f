"""Apply the filters of a dataset (`spider.config.cleaning`) to a batch of documents, by Arrow.

A document without a value in a column does not meet a condition on it. A document that fails several
conditions is counted by the first of them.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spider.config.cleaning import SIZE, Filter

_ORDER = {"<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_ORDER |= {"==": pc.equal, "!=": pc.not_equal}


def passing(
    filters: list[Filter], batch: pa.RecordBatch, texts: pa.Array, left_out: Counter[str], file: object
) -> pa.BooleanArray:
    """Return which documents meet all conditions, and count the others.

    A document without text meets them all, because it is counted as empty.

    Raises:
        ValueError: a column does not hold what the filter compares it with.
    """
    sizes = pc.binary_length(texts)
    keep = pa.array(np.ones(len(texts), bool))
    blank = pc.equal(sizes, 0).fill_null(True)
    for one in filters:
        values = sizes if one.column == SIZE else batch[one.column]
        try:
            met = pc.or_(_met(one, values).fill_null(False), blank)
        except pa.ArrowException as error:
            problem = f"column {one.column!r} ({values.type}) does not fit the filter {one.written!r}"
            raise ValueError(f"{file}: {problem}: {str(error).splitlines()[0]}") from None
        left_out[one.written] += pc.and_not(keep, met).true_count
        keep = pc.and_(keep, met)
    return keep


def _met(one: Filter, values: pa.Array) -> pa.BooleanArray:
    """Return which values meet a condition; null for a value that is null."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if isinstance(one.value, float):
        return _ORDER[one.operator](values.cast(pa.float64()), one.value)
    if isinstance(one.value, str):
        met = pc.match_substring_regex(values.cast(pa.large_string()), one.value)
    else:
        found = pc.is_in(values, pa.array(one.value, pa.string()).cast(values.type))
        met = pc.if_else(values.is_valid(), found, None)
    return met if one.operator in ("~", "==", "in") else pc.invert(met)
