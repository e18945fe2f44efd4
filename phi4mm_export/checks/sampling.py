"""What is kept of a whole output: enough to notice any mistake, small enough to store. numpy only.

Features [T, H] are kept as some whole rows plus the norm and two signed sums of every row; logits as fixed columns,
the largest eight, rms and log-sum-exp of every row; keys and values at six positions of all layers and heads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

WHOLE_ROWS = 24
"""Feature rows kept in full, spread evenly; those around the ends and row borders of pictures come on top."""
LOGIT_COLUMNS = 82
"""Seeded vocabulary columns kept of every row of logits; special tokens come on top."""
SPECIAL_COLUMNS = (0, 1, 198, 220, 199998, 199999, 200010, 200011, 200018, 200019, 200020, 200021, 200063)
TOP = 8


def words(tag: str, count: int) -> NDArray[np.uint64]:
    """`count` raw 64-bit Philox words keyed by `tag`: the same on every machine and numpy version."""
    key = int.from_bytes(hashlib.sha256(f"phi4mm/{tag}".encode()).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(count)


def sample(name: str, output: Array, vocab_size: int) -> dict[str, Array]:
    """The stored form of one output, by the kind that ends its name: features, logits, embeds, kv, tokens."""
    kind = name.rpartition("_")[2]
    prefix = name[: len(name) - len(kind)]
    if kind == "features":
        return _named(prefix, feature_samples(output))
    if kind == "logits":
        return _named(prefix, logit_samples(output, vocab_size))
    if kind == "kv":
        return {name: output[..., kv_positions(output.shape[-2]), :].astype(np.float32)}
    if kind == "tokens":
        return {name: output.astype(np.int64)}
    return {name: output.astype(np.float32)}


def sample_all(outputs: Mapping[str, Array], vocab_size: int) -> dict[str, Array]:
    """The stored form of all outputs of a case."""
    samples: dict[str, Array] = {}
    for name, output in outputs.items():
        samples |= sample(name, output, vocab_size)
    return samples


def feature_rows(count: int) -> NDArray[np.int64]:
    """Which of `count` feature rows are kept whole: all of few, else spread rows and those at the joints."""
    if count <= WHOLE_ROWS:
        return np.arange(count)
    spread = {int(i * count / WHOLE_ROWS) for i in range(WHOLE_ROWS)}
    joints = {0, 1, 15, 16, 17, count - 1, count - 2, count - 17, count - 18, count - 272, count - 273, count - 274}
    return np.array(sorted(row for row in spread | joints if 0 <= row < count))


def feature_samples(features: Array) -> dict[str, Array]:
    """[T, H] -> rows [R, H], norm [T] and sums [T, 2], the last two divided by sqrt(H)."""
    wide = features.astype(np.float64)
    width = wide.shape[1]
    sign = np.where(words("sign", 2 * width) & np.uint64(1), 1.0, -1.0).reshape(2, width)
    return {
        "rows": wide[feature_rows(len(wide))].astype(np.float32),
        "norm": (np.linalg.norm(wide, axis=1) / width**0.5).astype(np.float32),
        "sums": (wide @ sign.T / width**0.5).astype(np.float32),
    }


def logit_columns(vocab_size: int) -> NDArray[np.int64]:
    """Vocabulary columns kept of every row: special tokens, the last one and seeded others."""
    seeded = (words("columns", LOGIT_COLUMNS) % np.uint64(vocab_size)).astype(np.int64)
    return np.unique(np.concatenate([SPECIAL_COLUMNS, [vocab_size - 1], seeded]))


def logit_samples(logits: Array, vocab_size: int) -> dict[str, Array]:
    """[S, V] -> columns [S, C], top_ids and top [S, 8], rms [S] and log-sum-exp lse [S]."""
    wide = logits.astype(np.float64)
    best = np.argsort(-wide, axis=1, kind="stable")[:, :TOP]
    peak = wide.max(1)
    return {
        "columns": wide[:, logit_columns(vocab_size)].astype(np.float32),
        "top_ids": best.astype(np.int32),
        "top": np.take_along_axis(wide, best, 1).astype(np.float32),
        "rms": np.sqrt((wide**2).mean(1)).astype(np.float32),
        "lse": (peak + np.log(np.exp(wide - peak[:, None]).sum(1))).astype(np.float32),
    }


def kv_positions(count: int) -> NDArray[np.int64]:
    """Positions of `count` cached ones that are kept: both ends and two in the middle."""
    return np.unique(np.clip([0, 1, count // 3, count // 2, count - 2, count - 1], 0, count - 1))


def margins(samples: Mapping[str, Array], prefix: str) -> NDArray[np.float64]:
    """Lead of the best token over the second, in units of the row's rms: [S]."""
    top = samples[f"{prefix}top"].astype(np.float64)
    lead: NDArray[np.float64] = (top[:, 0] - top[:, 1]) / samples[f"{prefix}rms"]
    return lead


def _named(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {prefix + key: value for key, value in arrays.items()}
