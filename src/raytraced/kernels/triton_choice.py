"""Who is drawn, inside the Triton kernels: the random numbers of draws.py, and the candidate that they or the rates choose.

Axes: R rows of a block, L layers (Q: the next power of two), N experts per layer (P), M candidates of a block.
"""

import triton
import triton.language as tl


@triton.jit
def words_of(seed, row, step, block):
    """The four words of draws.py: Philox4x32-10 counted by (row, step or block of steps, block)."""
    c0, c1 = (row & 0xFFFFFFFF).to(tl.uint32), ((row >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = c0 * 0
    return tl.philox(tl.load(seed), c0, c1, zero + step.to(tl.uint32), zero + block.to(tl.uint32))


@triton.jit
def pick(w0, w1, w2, w3, which):
    """One of four words as a uniform number in double precision, as draws.py has it."""
    word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    return ((word >> 9).to(tl.float64) + 0.5) * 1.1920928955078125e-07


@triton.jit
def race_noise(seed, row_R, step, N: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, L: tl.constexpr):
    """Standard exponential numbers for the nodes (R, Q, P) and for the output node (R,), in double precision."""
    node_QP = tl.arange(0, Q)[:, None] * N + tl.arange(0, P)[None, :]
    row_RQP = row_R[:, None, None] + (node_QP * 0)[None, :, :]
    w0, w1, w2, w3 = words_of(seed, row_RQP, row_RQP * 0 + step, row_RQP * 0 + (1 + node_QP // 4)[None, :, :])
    # log in double: in single it would be wrong near one, and draws would not be the CPU's
    noise_RQP = -tl.log(pick(w0, w1, w2, w3, (node_QP % 4)[None, :, :]))
    M: tl.constexpr = L * N
    w0, w1, w2, w3 = words_of(seed, row_R, row_R * 0 + step, row_R * 0 + (1 + M // 4))
    return noise_RQP, -tl.log(pick(w0, w1, w2, w3, M % 4))


@triton.jit
def first_of(values_RM, values_most_R, M: tl.constexpr):
    """Where the largest value is, the first of equals."""
    index_1M = tl.arange(0, M)[None, :]
    return tl.min(tl.where(values_RM == values_most_R[:, None], index_1M, M), 1)


@triton.jit
def choose(
    probs_RQP, output_R, seed, draw_row_R, step,
    L: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    DRAWN: tl.constexpr, RACE: tl.constexpr, DOMINANT: tl.constexpr,
):  # fmt: skip
    """The candidate drawn (R,), as layer · P + node; Q · P for the output node, with the rate that counts for it."""
    M: tl.constexpr = Q * P
    probs_RM = tl.reshape(probs_RQP, (R, M))
    most_R = tl.max(probs_RM, 1)
    stops_R = output_R > most_R
    if DOMINANT:
        output_R = tl.where(stops_R, output_R, 0.0)
    if not DRAWN:
        choice_R = first_of(probs_RM, most_R, M)
    elif RACE:
        noise_RQP, noise_R = race_noise(seed, draw_row_R, step, N, Q, P, L)
        ratio_RM = tl.reshape(probs_RQP / noise_RQP.to(probs_RQP.dtype), (R, M))
        best_R = tl.max(ratio_RM, 1)
        choice_R = first_of(ratio_RM, best_R, M)
        if not DOMINANT:
            stops_R = output_R / noise_R.to(output_R.dtype) > best_R
    else:
        w0, w1, w2, w3 = words_of(seed, draw_row_R, draw_row_R * 0 + step // 4, draw_row_R * 0)
        reached_RM = tl.cumsum(probs_RM.to(tl.float64), 1)
        nodes_R = tl.max(reached_RM, 1)
        target_R = pick(w0, w1, w2, w3, step % 4) * (nodes_R + output_R.to(tl.float64))
        index_1M = tl.arange(0, M)[None, :]
        # Sums in another order may differ by a rounding: never draw a node that is no candidate.
        fits_RM = (reached_RM >= target_R[:, None]) & (probs_RM > 0)
        choice_R = tl.min(tl.where(fits_RM, index_1M, M), 1)
        last_R = tl.max(tl.where(probs_RM > 0, index_1M, 0), 1)
        choice_R = tl.where((choice_R == M) & (output_R <= 0), last_R, choice_R)
        if not DOMINANT:
            stops_R = choice_R == M
    # Nothing can be drawn where the rates are no distribution (all zero, NaN or infinite): the sequence ends.
    total_R = tl.sum(probs_RM, 1) + output_R
    can_draw_R = (total_R > 0) & (total_R < float("inf"))
    return tl.where(stops_R | ~can_draw_R, M, choice_R)
