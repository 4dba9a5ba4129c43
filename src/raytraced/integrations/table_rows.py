"""Rows of a table, dense or sparse: equal rows merged, the scale of each column, parts as dense arrays.

Axes: B rows, n rows that are kept, F features, Y targets.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

MOST_VALUES = 2**22  # of a sparse table that are made dense at once
MOST_ROWS = 4096  # that go through a model at once

Table = Any
"""rows (B, F): a NumPy array, or a SciPy CSR array or matrix"""


def merge_rows(
    X_BF: Table, targets_BY: NDArray[Any], weights_B: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Merge rows with equal features and targets, and leave out rows of weight 0.

    The result is sorted by the values of the rows, so that it does not depend on their order: training on a row of weight 2
    is exactly training on two such rows, wherever they are.

    Args:
        X_BF: Rows (B, F).
        targets_BY: Targets (B, Y).
        weights_B: Weights (B,), none of them negative.

    Returns:
        The index of one row of each kind (n,), and the sum of the weights of all rows of the kind (n,).
    """
    first: dict[bytes, int] = {}
    total: dict[bytes, float] = {}
    for row in np.flatnonzero(weights_B).tolist():
        key = _sort_key(X_BF, row) + _ordered(targets_BY[row])
        first.setdefault(key, row)
        total[key] = total.get(key, 0.0) + float(weights_B[row])
    keys = sorted(first)
    return np.array([first[key] for key in keys], dtype=np.int64), np.array([total[key] for key in keys])


def _sort_key(X_BF: Table, row: int) -> bytes:
    """Bytes that sort as the values of a row do, the first column first; those of a sparse row sort as those of a dense one."""
    if not sparse.issparse(X_BF):
        return _ordered(X_BF[row])
    here = slice(X_BF.indptr[row], X_BF.indptr[row + 1])
    columns, values = X_BF.indices[here], X_BF.data[here]
    # The first value that is not 0 decides: a positive one sorts a row after those that have it later, a negative one before.
    tokens = np.empty(len(values), dtype=[("sign", "u1"), ("column", ">u4"), ("value", "S8")])
    tokens["sign"] = np.where(values > 0, 2, 0)
    tokens["column"] = np.where(values > 0, 2**32 - 1 - columns.astype(np.int64), columns)
    tokens["value"] = np.frombuffer(_ordered(values), dtype="S8")
    return tokens.tobytes() + b"\x01"


def _ordered(values: NDArray[Any]) -> bytes:
    """Eight bytes for each number, which sort as the numbers do."""
    bits = (values.astype(np.float64) + 0.0).view(np.uint64)  # + 0.0: a negative zero is a zero
    top = np.uint64(1 << 63)
    return np.where(bits & top, ~bits, bits | top).astype(">u8").tobytes()


def canonical_table(X_BF: Table) -> Table:
    """The same rows; a sparse table becomes CSR with sorted columns, each once and none of them 0."""
    if not sparse.issparse(X_BF):
        return X_BF
    rows_BF = X_BF.tocsr(copy=True)
    rows_BF.sum_duplicates()
    rows_BF.eliminate_zeros()
    return rows_BF


def dense_rows(X_BF: Table, rows: NDArray[np.int64] | slice) -> NDArray[Any]:
    """Some rows as a dense array (n, F)."""
    part = X_BF[rows]
    return part.toarray() if sparse.issparse(part) else part


def row_parts(X_BF: Table, rows_n: NDArray[np.int64] | None = None) -> Iterator[NDArray[np.int64]]:
    """The numbers of the given rows, or of all rows, in parts of which each may be dense and go through a model at once."""
    numbers_n = np.arange(X_BF.shape[0]) if rows_n is None else rows_n
    size = MOST_ROWS if not sparse.issparse(X_BF) else max(1, min(MOST_ROWS, MOST_VALUES // max(1, X_BF.shape[1])))
    return (numbers_n[start : start + size] for start in range(0, len(numbers_n), size))


def measure_columns(
    name: str, X_BF: Table, rows_n: NDArray[np.int64], weights_n: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The weighted mean and variance of each column.

    Args:
        name: What the columns are called in the error.
        X_BF: Rows (B, F).
        rows_n: Numbers of the rows to measure (n,).
        weights_n: Their weights (n,), of positive sum.

    Returns:
        Mean (F,) and variance (F,).

    Raises:
        ValueError: A number is too large for them.
    """
    shares_n = weights_n / weights_n.sum()

    def mean_of(centre: NDArray[np.float64] | float, power: int) -> NDArray[np.float64]:
        sums, start = np.zeros(X_BF.shape[1]), 0
        for part in row_parts(X_BF, rows_n):
            values = dense_rows(X_BF, part).astype(np.float64) - centre
            sums += shares_n[start : start + len(part)] @ values**power
            start += len(part)
        return sums

    with np.errstate(over="ignore", invalid="ignore"):
        mean_F = mean_of(0.0, 1)
        variance_F = mean_of(mean_F, 2)
    if not np.isfinite(variance_F).all():
        largest = np.abs(X_BF.data if sparse.issparse(X_BF) else X_BF).max()
        raise ValueError(f"{name}: holds values up to {largest:.1e}, too large to standardise; scale them first")
    return mean_F, variance_F
