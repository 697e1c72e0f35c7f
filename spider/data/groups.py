"""Read the groups (``split_by``) of held-out documents, and choose documents so that no group dominates.

Encoding records the groups in the part records of the validation split (``validation/000.json``), as pairs of
a name and a number of documents. They are not in ``metadata.json``, so they do not change a dataset's digest.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from spider.data.metadata import load_metadata
from spider.data.shards import Shards
from spider.files import read_json

#: Most documents of a part, and of a dataset, whose groups are recorded and read.
MOST_DOCUMENTS = 4096
#: Most bytes of a recorded name.
NAME_BYTES = 100


def held_out_groups(folder: Path) -> list[str]:
    """Return the groups of the first documents of the validation split, at most `MOST_DOCUMENTS`.

    The list is empty without ``split_by``, for published shards, and for shards of an earlier Spider.
    """
    names: list[str] = []
    for shard in load_metadata(folder).splits["validation"].shards:
        record = (folder / shard.file).with_suffix(".json")
        runs = read_json(record).get("groups", []) if record.exists() else []
        names += [name for name, documents in runs for _ in range(documents)]
        if len(names) >= MOST_DOCUMENTS or sum(documents for _, documents in runs) < shard.documents:
            break
    return names[:MOST_DOCUMENTS]


def scored_groups(folder: Path, max_bytes: int, largest_group: float | None) -> list[str]:
    """Return the groups of the first documents that an evaluation scores, as far as they are recorded."""
    if largest_group is None:
        return held_out_groups(folder)
    return balanced(folder, max_bytes, largest_group)[1]


def balanced(folder: Path, max_bytes: int, largest_group: float) -> tuple[np.ndarray, list[str]]:
    """Choose held-out documents so that no group has more than ``largest_group`` of their bytes.

    As many bytes as possible are chosen, the same limit for each group, and from each group its first
    documents within the limit.

    Args:
        folder: Shards folder of the dataset.
        max_bytes: Most bytes of all chosen documents.
        largest_group: Largest share of one group, above 0 and at most 1.

    Returns:
        The ids of the chosen documents, in the order of the split, and the group of each document.

    Raises:
        ValueError: The groups are not recorded, or there are too few of them.
    """
    groups = held_out_groups(folder)
    if not groups:
        raise ValueError(
            f"{folder}: the shards do not record the groups of held-out documents, which "
            "evaluation.largest_group needs; delete "
            f"{folder} and run `snakemake datasets/{folder.name}` with split_by, or leave the key out"
        )
    shards = Shards(folder, "validation")
    begins_D = np.concatenate([shards.begins(s) + shards.borders[s] for s in range(len(shards.maps))])
    bounds_D = np.append(begins_D, shards.tokens)[: len(groups) + 1]
    tokens_N = shards.read(0, int(bounds_D[-1]))
    bytes_D = np.add.reduceat(shards.vocabulary.bytes_of[tokens_N], bounds_D[:-1], dtype=np.int64)
    so_far = Counter[str]()
    end_D = np.zeros_like(bytes_D)
    for document, (group, size) in enumerate(zip(groups, bytes_D.tolist(), strict=True)):
        so_far[group] += size
        end_D[document] = so_far[group]
    # In the order of their ends within their groups, the last chosen document ends the largest group.
    order_D = np.argsort(end_D, kind="stable")
    total_D = np.cumsum(bytes_D[order_D])
    fits_D = (total_D <= max_bytes) & (end_D[order_D] <= largest_group * total_D)
    if not fits_D.any():
        raise ValueError(
            f"{folder}: {len(so_far)} groups are held out, too few or too uneven for a text with at most "
            f"{largest_group:.0%} from each (evaluation.largest_group); raise validation, the share of "
            "groups, or evaluation.max_bytes, or leave largest_group out"
        )
    chosen_D = np.sort(order_D[: np.flatnonzero(fits_D)[-1] + 1])
    ids = np.concatenate([tokens_N[bounds_D[i] : bounds_D[i + 1]] for i in chosen_D.tolist()])
    return ids, [groups[i] for i in chosen_D.tolist()]
