"""The activation sequence as two Triton kernels: a program carries a block of rows through all of its steps.

What is active, rates and gradients by node are tensors (R, Q, P) in registers. Every step sends the entry rates through the
layers anew, down to the first one in which no row of the block is active; the work is that of the active nodes, whose gates are
read one at a time. The backward kernel knows the draws alone. It removes them last first, computes the rates that each was made
from, and keeps the splits of one step in global memory, where a program uses the same few kilobytes over and over.

Axes: R rows of a block, L layers (Q: the next power of two), N experts per layer (P), O = N + 1 outlets, the last one that of
the output node, T steps. In (R, P, P) the first P is the gate's node, the second its outlet.
"""

import triton
import triton.language as tl

from raytraced.kernels.triton_choice import choose, race_noise


@triton.jit
def of_layer(values_RQP, layers_1Q1, layer):
    """One layer (R, P) of a value by node."""
    return tl.sum(tl.where(layers_1Q1 == layer, values_RQP, 0.0), 1)


@triton.jit
def of_node(values_RPP, index_P, node):
    """One node's outlets (R, P)."""
    return tl.sum(tl.where(index_P[None, :, None] == node, values_RPP, 0.0), 1)


@triton.jit
def next_waiting(waiting_P, index_P, P: tl.constexpr):
    """The first node that waits, and the others."""
    node = tl.min(tl.where(waiting_P > 0, index_P, P), 0)
    return node, tl.where(index_P == node, 0, waiting_P)


@triton.jit
def split(logits_RPP, logit_out_RP, inside_P):
    """A softmax over the outlets to nodes and the one to the output node."""
    logits_RPP = tl.where(inside_P[None, None, :], logits_RPP, float("-inf"))
    most_RP = tl.maximum(tl.max(logits_RPP, 2), logit_out_RP)
    soft_RPP, soft_out_RP = tl.exp(logits_RPP - most_RP[:, :, None]), tl.exp(logit_out_RP - most_RP)
    total_RP = tl.sum(soft_RPP, 2) + soft_out_RP
    return soft_RPP / total_RP[:, :, None], soft_out_RP / total_RP


@triton.jit
def routing(
    entry_RP, active_RQP, num_gated, first, senders, input_logits, splits, row_R, in_R,
    L: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    INPUT_CONDITIONED: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Firing rates (R, Q, P) and those of the output node (R,), when no gate below the first `num_gated` layers gets any."""
    O: tl.constexpr = N + 1
    index_P, layers_1Q1 = tl.arange(0, P), tl.arange(0, Q)[None, :, None]
    inside_P = index_P < N
    tile_PP, in_tile_PP = index_P[:, None] * O + index_P[None, :], inside_P[:, None] & inside_P[None, :]
    rates_RQP, rates_RP = active_RQP * 0, entry_RP
    output_R = tl.sum(entry_RP * 0, 1)
    logits_RPP = entry_RP[:, :, None] + (index_P * 0)[None, None, :].to(entry_RP.dtype)
    logit_out_RP = entry_RP
    if L > 1:
        logits_RPP *= tl.load(first + tile_PP, mask=in_tile_PP, other=0.0)[None, :, :]
        logit_out_RP *= tl.load(first + index_P * O + N, mask=inside_P, other=0.0)[None, :]
    for layer in range(num_gated):
        rates_RQP = tl.where(layers_1Q1 == layer, rates_RP[:, None, :], rates_RQP)
        if INPUT_CONDITIONED:
            input_row_R = (row_R * (L - 1) + layer) * (N * O)
            in_input_RPP = in_R[:, None, None] & in_tile_PP[None, :, :]
            logits_RPP += tl.load(
                input_logits + input_row_R[:, None, None] + tile_PP[None, :, :], mask=in_input_RPP, other=0.0
            )
            out_RP = input_row_R[:, None] + (index_P * O + N)[None, :]
            logit_out_RP += tl.load(input_logits + out_RP, mask=in_R[:, None] & inside_P[None, :], other=0.0)
        soft_RPP, soft_out_RP = split(logits_RPP, logit_out_RP, inside_P)
        if KEEPS:
            place = splits + layer * (R * P * (P + 1))
            rows_RP = (tl.arange(0, R) * P)[:, None] + index_P[None, :]
            tl.store(place + rows_RP[:, :, None] * P + index_P[None, None, :], soft_RPP)
            tl.store(place + R * P * P + rows_RP, soft_out_RP)
        on_RP = of_layer(active_RQP, layers_1Q1, layer)
        passed_RP = rates_RP * on_RP
        output_R += tl.sum(passed_RP * soft_out_RP, 1)
        sent_RPP = passed_RP[:, :, None] * soft_RPP
        rates_RP = tl.sum(sent_RPP, 1)
        # What the next layer's gates make of it, sender by sender; the last layer has no gates.
        logits_RPP, logit_out_RP = sent_RPP * 0, rates_RP * 0
        waiting_P = tl.where(layer + 1 < L - 1, (tl.max(on_RP, 0) > 0).to(tl.int32), 0)
        for _ in range(tl.sum(waiting_P, 0)):
            node, waiting_P = next_waiting(waiting_P, index_P, P)
            to_RP = of_node(sent_RPP, index_P, node)
            gates = senders + (layer * N + node) * (N * O)
            logits_RPP += to_RP[:, :, None] * tl.load(gates + tile_PP, mask=in_tile_PP, other=0.0)[None, :, :]
            logit_out_RP += to_RP * tl.load(gates + index_P * O + N, mask=inside_P, other=0.0)[None, :]
    rates_RQP = tl.where(layers_1Q1 == num_gated, rates_RP[:, None, :], rates_RQP)
    output_R += tl.sum(rates_RP * of_layer(active_RQP, layers_1Q1, num_gated), 1)
    return rates_RQP, output_R


@triton.jit
def num_layers_active(active_RQP, Q: tl.constexpr):
    """How many layers there are down to the deepest in which any row of the block is active."""
    reached_Q = tl.max(tl.max(active_RQP, 2), 0) > 0
    return tl.max(tl.where(reached_Q, tl.arange(0, Q) + 1, 0), 0)


@triton.jit
def sequence_forward(
    entry, first, senders, input_logits, seed, rows, stops, active, rates, output, nodes, num_active, B, T,
    L: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    INPUT_CONDITIONED: tl.constexpr, DRAWN: tl.constexpr, HAS_ROWS: tl.constexpr, RACE: tl.constexpr, DOMINANT: tl.constexpr,
    COUNTS: tl.constexpr, HAS_STOPS: tl.constexpr,
):  # fmt: skip
    """What each row of a block activates; `nodes` and `num_active` come as −1 and 0."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    in_R = row_R < B
    index_P, layers_1Q1 = tl.arange(0, P), tl.arange(0, Q)[None, :, None]
    in_RP = in_R[:, None] & (index_P < N)[None, :]
    draw_row_R = tl.load(rows + row_R, mask=in_R, other=0) if HAS_ROWS else row_R
    entry_RP = tl.load(entry + row_R[:, None] * N + index_P[None, :], mask=in_RP, other=0.0)
    flat_QP = (layers_1Q1 * P + index_P[None, None, :]) + 0 * tl.arange(0, R)[:, None, None]
    active_RQP = tl.zeros((R, Q, P), entry.dtype.element_ty)
    rates_RQP = tl.where(layers_1Q1 == 0, entry_RP[:, None, :], active_RQP)
    output_R = tl.sum(entry_RP * 0, 1)
    running_R = in_R
    step, going = 0, tl.max(in_R.to(tl.int32), 0)
    while (step < T) & (going > 0):
        probs_RQP = rates_RQP * (1 - active_RQP)
        # A number for each row, or one for all: how much the output node's rate counts in the choice.
        counted_R = output_R * tl.load(stops + row_R, mask=in_R, other=1.0) if HAS_STOPS else output_R * COUNTS
        choice_R = choose(
            probs_RQP, counted_R, seed, draw_row_R, step, L, N, Q, P, R, DRAWN, RACE, DOMINANT
        )  # fmt: skip
        running_R = running_R & (choice_R < Q * P)
        node_R = (choice_R // P * N + choice_R % P).to(tl.int64)
        tl.store(nodes + row_R * T + step, node_R, mask=running_R)
        tl.store(num_active + row_R, tl.full((R,), step + 1, tl.int64), mask=running_R)
        drawn_RQP = (flat_QP == choice_R[:, None, None]) & running_R[:, None, None]
        active_RQP = tl.where(drawn_RQP, 1.0, active_RQP)
        num_gated = tl.minimum(num_layers_active(active_RQP, Q), L - 1)
        rates_RQP, output_R = routing(
            entry_RP,
            active_RQP,
            num_gated,
            first,
            senders,
            input_logits,
            input_logits,
            row_R,
            in_R,
            L,
            N,
            Q,
            P,
            R,
            INPUT_CONDITIONED,
            False,
        )
        going = tl.max(running_R.to(tl.int32), 0)
        step += 1
    node_QP = layers_1Q1 * N + index_P[None, None, :]
    place_RQP = row_R[:, None, None] * (L * N) + node_QP
    in_RQP = in_RP[:, None, :] & (layers_1Q1 < L)
    tl.store(active + place_RQP, active_RQP, mask=in_RQP)
    tl.store(rates + place_RQP, rates_RQP, mask=in_RQP)
    tl.store(output + row_R, output_R, mask=in_R)


@triton.jit
def estimate(
    grad_RQP, probs_RQP, output_R, drawn_RQP, seed, draw_row_R, step, temperature,
    L: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
    ESTIMATOR: tl.constexpr, DRAWN: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """From the gradient of a draw to those of the nodes' probabilities (R, Q, P) and of the output node's (R,)."""
    grad_RQP = tl.where(probs_RQP > 0, grad_RQP, 0.0)
    floor = tl.full((), FLOOR, probs_RQP.dtype)  # a bare number would be rounded to single precision
    floor_RQP, floor_R = tl.maximum(probs_RQP, floor), tl.maximum(output_R, floor)
    if ESTIMATOR == 0:  # straight-through
        result_RQP, result_R = grad_RQP, output_R * 0
    elif ESTIMATOR == 1:  # reinmax: (g − g_draw) / 2 for all others, (g_draw − Σ p g) / 2p for what was drawn
        grad_drawn_R = tl.sum(tl.sum(tl.where(drawn_RQP, grad_RQP, 0.0), 2), 1)
        own_R = (grad_drawn_R - tl.sum(tl.sum(probs_RQP * grad_RQP, 2), 1)) / 2
        is_output_R = tl.max(tl.max(drawn_RQP.to(tl.int32), 2), 1) == 0
        others_RQP = (grad_RQP - grad_drawn_R[:, None, None]) / 2
        result_RQP = tl.where(drawn_RQP, own_R[:, None, None] / floor_RQP, others_RQP)
        result_R = tl.where(is_output_R, own_R / floor_R, -grad_drawn_R / 2)
    else:  # gumbel
        logits_RQP = tl.log(tl.where(probs_RQP > 0, probs_RQP, 1.0))
        logit_R = tl.log(tl.where(output_R > 0, output_R, 1.0))
        temperature = tl.load(temperature).to(probs_RQP.dtype)
        if DRAWN:
            noise_RQP, noise_R = race_noise(seed, draw_row_R, step, N, Q, P, L)
            logits_RQP -= tl.log(noise_RQP.to(probs_RQP.dtype))
            logit_R -= tl.log(noise_R.to(output_R.dtype))
        # not −∞: rows beyond the batch have no candidate at all
        logits_RQP = tl.where(probs_RQP > 0, logits_RQP / temperature, -1e30)
        logit_R = tl.where(output_R > 0, logit_R / temperature, -1e30)
        most_R = tl.maximum(tl.max(tl.max(logits_RQP, 2), 1), logit_R)
        soft_RQP, soft_R = tl.exp(logits_RQP - most_R[:, None, None]), tl.exp(logit_R - most_R)
        total_R = tl.sum(tl.sum(soft_RQP, 2), 1) + soft_R
        mean_R = tl.sum(tl.sum(soft_RQP * grad_RQP, 2), 1) / total_R
        soft_RQP, soft_R = soft_RQP / total_R[:, None, None], soft_R / total_R
        result_RQP = soft_RQP * (grad_RQP - mean_R[:, None, None]) / (temperature * floor_RQP)
        result_R = -soft_R * mean_R / (temperature * floor_R)
    return tl.where(probs_RQP > 0, result_RQP, 0.0), tl.where(output_R > 0, result_R, 0.0)


@triton.jit
def routing_backward(
    grad_rates_RQP, grad_output_R, entry_RP, active_RQP, rates_RQP, num_gated, first, inner, splits,
    grad_first, grad_inner, grad_input_logits, row_R, in_R,
    L: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, R: tl.constexpr, INPUT_CONDITIONED: tl.constexpr,
):  # fmt: skip
    """Back through `routing`: the gradient of what is active (R, Q, P) and of the entry (R, P); those of gates are added."""
    O: tl.constexpr = N + 1
    index_P, layers_1Q1 = tl.arange(0, P), tl.arange(0, Q)[None, :, None]
    inside_P = index_P < N
    in_tile_PP = inside_P[:, None] & inside_P[None, :]
    tile_PP, out_P = index_P[:, None] * O + index_P[None, :], index_P * O + N
    rows_RP = (tl.arange(0, R) * P)[:, None] + index_P[None, :]
    rows_RPP = rows_RP[:, :, None] * P + index_P[None, None, :]

    # The last layer that rates reach sends all it has to the output node, if it has no gates.
    rates_RP, on_RP = of_layer(rates_RQP, layers_1Q1, num_gated), of_layer(active_RQP, layers_1Q1, num_gated)
    grad_active_RQP = tl.where(layers_1Q1 == num_gated, (rates_RP * grad_output_R[:, None])[:, None, :], 0.0)
    grad_RP = of_layer(grad_rates_RQP, layers_1Q1, num_gated) + on_RP * grad_output_R[:, None]
    # Of what is sent (node, outlet): the gradient of the receiver's rate, and, if the receiver's gate was used, of its logits.
    grad_sent_RPP = tl.zeros((R, P, P), entry_RP.dtype) + grad_RP[:, None, :]
    through_RP = entry_RP * 0  # of the entry by the first layer's logits
    for back in range(num_gated):
        layer = num_gated - 1 - back
        place = splits + layer * (R * P * (P + 1))
        soft_RPP, soft_out_RP = tl.load(place + rows_RPP), tl.load(place + R * P * P + rows_RP)
        rates_RP, on_RP = of_layer(rates_RQP, layers_1Q1, layer), of_layer(active_RQP, layers_1Q1, layer)
        mean_RP = tl.sum(grad_sent_RPP * soft_RPP, 2) + grad_output_R[:, None] * soft_out_RP
        grad_active_RQP = tl.where(layers_1Q1 == layer, (rates_RP * mean_RP)[:, None, :], grad_active_RQP)
        passed_RP = rates_RP * on_RP
        grad_logits_RPP = passed_RP[:, :, None] * soft_RPP * (grad_sent_RPP - mean_RP[:, :, None])
        grad_out_RP = passed_RP * soft_out_RP * (grad_output_R[:, None] - mean_RP)
        grad_RP = of_layer(grad_rates_RQP, layers_1Q1, layer) + on_RP * mean_RP
        if INPUT_CONDITIONED:
            input_row = grad_input_logits + ((row_R * (L - 1) + layer) * (N * O))[:, None]
            in_RP = in_R[:, None] & inside_P[None, :]
            in_RPP = in_R[:, None, None] & in_tile_PP[None, :, :]
            input_row_RPP = input_row[:, :, None] + tile_PP[None, :, :]
            tl.store(input_row_RPP, tl.load(input_row_RPP, mask=in_RPP, other=0.0) + grad_logits_RPP, mask=in_RPP)
            input_row_RP = input_row + out_P[None, :]
            tl.store(input_row_RP, tl.load(input_row_RP, mask=in_RP, other=0.0) + grad_out_RP, mask=in_RP)
        grad_sent_RPP = tl.zeros((R, P, P), entry_RP.dtype) + grad_RP[:, None, :]
        if layer == 0:
            weight_PP = tl.load(first + tile_PP, mask=in_tile_PP, other=0.0)
            weight_P = tl.load(first + out_P, mask=inside_P, other=0.0)
            through_RP = tl.sum(grad_logits_RPP * weight_PP[None, :, :], 2) + grad_out_RP * weight_P[None, :]
            sum_PP = tl.load(grad_first + tile_PP, mask=in_tile_PP, other=0.0)
            sum_P = tl.load(grad_first + out_P, mask=inside_P, other=0.0)
            sum_PP += tl.sum(grad_logits_RPP * entry_RP[:, :, None], 0)
            sum_P += tl.sum(grad_out_RP * entry_RP, 0)
            tl.store(grad_first + tile_PP, sum_PP, mask=in_tile_PP)
            tl.store(grad_first + out_P, sum_P, mask=inside_P)
        else:
            # Only the gates of active nodes have a gradient: one at a time, with its inputs, a column of the layer above.
            above = splits + (layer - 1) * (R * P * (P + 1))
            above_RP = of_layer(rates_RQP * active_RQP, layers_1Q1, layer - 1)
            waiting_P = (tl.max(on_RP, 0) > 0).to(tl.int32)
            for _ in range(tl.sum(waiting_P, 0)):
                node, waiting_P = next_waiting(waiting_P, index_P, P)
                input_RP = above_RP * tl.load(above + rows_RP * P + node)
                one_RP = of_node(grad_logits_RPP, index_P, node)
                one_out_R = tl.sum(tl.where(index_P[None, :] == node, grad_out_RP, 0.0), 1)
                gate = ((layer - 1) * N + node) * (O * N)
                square_PP = index_P[:, None] * N + index_P[None, :]  # (outlet, input)
                weight_PP = tl.load(inner + gate + square_PP, mask=in_tile_PP, other=0.0)
                weight_P = tl.load(inner + gate + N * N + index_P, mask=inside_P, other=0.0)
                column_RP = (
                    tl.sum(one_RP[:, :, None] * weight_PP[None, :, :], 1) + one_out_R[:, None] * weight_P[None, :]
                )
                grad_sent_RPP += tl.where(index_P[None, None, :] == node, column_RP[:, :, None], 0.0)
                sum_PP = tl.load(grad_inner + gate + square_PP, mask=in_tile_PP, other=0.0)
                sum_P = tl.load(grad_inner + gate + N * N + index_P, mask=inside_P, other=0.0)
                sum_PP += tl.sum(one_RP[:, :, None] * input_RP[:, None, :], 0)
                sum_P += tl.sum(one_out_R[:, None] * input_RP, 0)
                tl.store(grad_inner + gate + square_PP, sum_PP, mask=in_tile_PP)
                tl.store(grad_inner + gate + N * N + index_P, sum_P, mask=inside_P)
    return grad_active_RQP, grad_RP + through_RP


@triton.jit
def sequence_backward(
    entry, first, senders, inner, input_logits, seed, rows, nodes, num_active,
    grad_active, grad_rates, grad_output, grad_entry, grad_first, grad_inner, grad_input_logits, splits, temperature, B, T,
    L: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    INPUT_CONDITIONED: tl.constexpr, DRAWN: tl.constexpr, HAS_ROWS: tl.constexpr, ESTIMATOR: tl.constexpr, FLOOR: tl.constexpr,
    HAS_ACTIVE: tl.constexpr, HAS_RATES: tl.constexpr, HAS_OUTPUT: tl.constexpr,
):  # fmt: skip
    """Gradients of entry, gates and input_logits; each program sums its blocks into a copy of its own."""
    O: tl.constexpr = N + 1
    program = tl.program_id(0).to(tl.int64)
    grad_first += program * (N * O)
    grad_inner += program * ((L - 2) * N * O * N if L > 2 else 0)
    splits += program * ((L - 1) * R * P * (P + 1))
    index_P, layers_1Q1 = tl.arange(0, P), tl.arange(0, Q)[None, :, None]
    inside_P = index_P < N
    for block in range(tl.program_id(0), tl.cdiv(B, R), tl.num_programs(0)):
        row_R = block * R + tl.arange(0, R).to(tl.int64)
        in_R = row_R < B
        in_RP = in_R[:, None] & inside_P[None, :]
        draw_row_R = tl.load(rows + row_R, mask=in_R, other=0) if HAS_ROWS else row_R
        entry_RP = tl.load(entry + row_R[:, None] * N + index_P[None, :], mask=in_RP, other=0.0)
        node_RQP = layers_1Q1 * N + index_P[None, None, :] + 0 * tl.arange(0, R)[:, None, None]
        in_RQP = in_RP[:, None, :] & (layers_1Q1 < L)
        place_RQP = row_R[:, None, None] * (L * N) + node_RQP
        node_RQP = tl.where(in_RQP, node_RQP, -2)
        active_RQP = tl.zeros((R, Q, P), entry.dtype.element_ty)
        grad_active_RQP, grad_rates_RQP = active_RQP, active_RQP
        grad_output_R, grad_entry_RP = tl.sum(entry_RP * 0, 1), entry_RP * 0
        if HAS_ACTIVE:
            grad_active_RQP = tl.load(grad_active + place_RQP, mask=in_RQP, other=0.0)
        if HAS_RATES:
            grad_rates_RQP = tl.load(grad_rates + place_RQP, mask=in_RQP, other=0.0)
        if HAS_OUTPUT:
            grad_output_R = tl.load(grad_output + row_R, mask=in_R, other=0.0)

        count_R = tl.load(num_active + row_R, mask=in_R, other=0).to(tl.int32)
        for step in range(tl.max(count_R, 0)):
            node_R = tl.load(nodes + row_R * T + step, mask=in_R, other=-1)
            active_RQP = tl.where(node_RQP == node_R[:, None, None], 1.0, active_RQP)
        # First the rates under the final set, then the draws, last first; the stop is a draw, unless the steps ran out.
        last_R = tl.where(count_R < T, count_R, T - 1)
        num_passes = 1
        if ESTIMATOR != 3:  # none
            num_passes = 2 + tl.max(tl.where(in_R, last_R, -1), 0)
        for one in range(num_passes):
            step = num_passes - 1 - one
            node_R = tl.load(nodes + row_R * T + step, mask=in_R & (step < count_R) & (one > 0), other=-1)
            drawn_RQP = node_RQP == node_R[:, None, None]
            active_RQP = tl.where(drawn_RQP, 0.0, active_RQP)
            num_gated = tl.minimum(num_layers_active(active_RQP, Q) + 1, L - 1)
            tl.debug_barrier()  # what other threads read of the step before
            rates_RQP, output_R = routing(
                entry_RP,
                active_RQP,
                num_gated,
                first,
                senders,
                input_logits,
                splits,
                row_R,
                in_R,
                L,
                N,
                Q,
                P,
                R,
                INPUT_CONDITIONED,
                True,
            )
            if ESTIMATOR != 3:  # noqa: SIM102 — known to the compiler, the next one only to the device
                if one > 0:
                    probs_RQP = rates_RQP * (1 - active_RQP)
                    grad_probs_RQP, grad_output_R = estimate(
                        grad_active_RQP, probs_RQP, output_R, drawn_RQP, seed, draw_row_R, step, temperature,
                        L, N, Q, P, ESTIMATOR, DRAWN, FLOOR,
                    )  # fmt: skip
                    takes_part_R = in_R & (step <= last_R)
                    grad_rates_RQP = tl.where(takes_part_R[:, None, None], grad_probs_RQP, 0.0)
                    grad_output_R = tl.where(takes_part_R, grad_output_R, 0.0)
                    grad_active_RQP -= grad_rates_RQP * rates_RQP
            tl.debug_barrier()  # the splits are there
            more_active_RQP, more_entry_RP = routing_backward(
                grad_rates_RQP, grad_output_R, entry_RP, active_RQP, rates_RQP, num_gated, first, inner, splits,
                grad_first, grad_inner, grad_input_logits, row_R, in_R, L, N, Q, P, R, INPUT_CONDITIONED,
            )  # fmt: skip
            grad_active_RQP += more_active_RQP
            grad_entry_RP += more_entry_RP
        tl.store(grad_entry + row_R[:, None] * N + index_P[None, :], grad_entry_RP, mask=in_RP)
