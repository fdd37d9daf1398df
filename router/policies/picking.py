"""What policies share: picking the least of a cost column, and saying how it came about."""

from __future__ import annotations

import zlib

import numpy as np

from router.candidates import Candidates, Floats, Ints
from router.choice import Choice, Prediction, RouteRequest, Score
from router.prediction import Predicted, predict

SHOWN = 4
"""Candidates that a choice names with their costs."""
_SAME = 1e-9
"""Costs that differ by less, relatively, are equal: sums in another order must not decide."""


def choice_of(
    request: RouteRequest,
    candidates: Candidates,
    usable: Ints,
    cost: Floats,
    predicted: Predicted | None = None,
    others_s: Floats | None = None,
    near: float = 0.0,
) -> Choice:
    """The row of `usable` with the least cost.

    Of those that cost up to `near` more the one with most of the prompt; of equals the one with fewest open requests,
    then the longest unchosen, then one by lot. All columns are over `usable`, rows of `candidates`, of which there is
    at least one. Without `predicted`, the chosen one alone is predicted.
    """
    at = _least(request, candidates, usable, cost, near)
    index = int(usable[at])
    if predicted is None:
        mine = predict(request, candidates, usable[at : at + 1])
        load_tokens, prediction = int(mine.load_tokens[0]), mine.row(0)
    else:
        load_tokens, prediction = int(predicted.load_tokens[at]), _row(predicted, others_s, at)
    shown = [at, *(row for row in _best(cost).tolist() if row != at)][:SHOWN]
    scores = tuple(
        Score(
            candidates.ids[usable[row]],
            float(cost[row]),
            _row(predicted, others_s, row) if predicted is not None else None,
        )
        for row in shown
    )
    matched = min(int(candidates.matched[index]), request.prompt_tokens)
    return Choice(candidates.ids[index], index, matched, load_tokens, prediction, scores)


def _row(predicted: Predicted, others_s: Floats | None, row: int) -> Prediction:
    return predicted.row(row, float(others_s[row]) if others_s is not None else 0.0)


def _least(request: RouteRequest, candidates: Candidates, usable: Ints, cost: Floats, near: float) -> int:
    lowest = cost.min()
    tied = np.flatnonzero(cost <= lowest + max(near, abs(lowest) * _SAME))
    if len(tied) > 1 and near > 0:
        tied = _lowest(tied, -candidates.matched[usable[tied]])
    if len(tied) > 1:
        tied = _lowest(tied, candidates.open_requests[usable[tied]])
    if len(tied) > 1:
        tied = _lowest(tied, candidates.last_chosen[usable[tied]])
    if len(tied) == 1:
        return int(tied[0])
    # A hash of the request: routers that just started must not all pick the same.
    names = [(candidates.ids[usable[at]], int(at)) for at in tied]
    return min(names, key=lambda name: (zlib.crc32(f"{request.request_id}/{name[0]}".encode()), name[0]))[1]


def _lowest(rows: Ints, values: Ints) -> Ints:
    lowest: Ints = rows[values == values.min()]
    return lowest


def _best(cost: Floats) -> Ints:
    if len(cost) <= SHOWN:
        return np.argsort(cost, kind="stable")
    few: Ints = np.argpartition(cost, SHOWN)[:SHOWN]
    best: Ints = few[np.argsort(cost[few], kind="stable")]
    return best
