"""A kernel that draws numbers as the sequence's kernels do, for a test of them alone. Axes: R rows, Q layers, P experts."""

import triton
import triton.language as tl

from raytraced.kernels.triton_choice import pick, race_noise, words_of


@triton.jit
def draw(seed, rows, uniforms, noise, step, N: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, L: tl.constexpr):
    """Of eight rows one uniform number each, and an exponential one for each of L·N nodes and the output node."""
    row_R = tl.load(rows + tl.arange(0, 8))
    w0, w1, w2, w3 = words_of(seed, row_R, row_R * 0 + step // 4, row_R * 0)
    tl.store(uniforms + tl.arange(0, 8), pick(w0, w1, w2, w3, step % 4))
    nodes_RQP, output_R = race_noise(seed, row_R, step, N, Q, P, L)
    node_QP = tl.arange(0, Q)[:, None] * N + tl.arange(0, P)[None, :]
    mask_QP = (tl.arange(0, Q) < L)[:, None] & (tl.arange(0, P) < N)[None, :]
    place_R = tl.arange(0, 8) * (L * N + 1)
    tl.store(noise + place_R[:, None, None] + node_QP[None, :, :], nodes_RQP, mask=mask_QP[None, :, :])
    tl.store(noise + place_R + L * N, output_R)
