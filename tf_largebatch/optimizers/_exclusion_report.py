"""Which variables an optimizer decays or adapts and which not, for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tf_largebatch.optimizers._exclusions import path_of


def exclusion_report(
    variables: Sequence[Any], excluded: Mapping[int, str], *, treatment: str
) -> str:
    """A line of counts, and one for each variable.

    Args:
        variables: all that the optimizer updates.
        excluded: the positions of those that the user left out, and why.
        treatment: what the others are, as `"decayed"`.
    """
    rows = [
        (path_of(variable), tuple(variable.shape), excluded.get(position))
        for position, variable in enumerate(variables)
    ]
    treated = [shape for _, shape, reason in rows if reason is None and len(shape) > 1]
    elements = [sum(map(math.prod, shapes)) for shapes in (treated, [row[1] for row in rows])]
    lines = [
        f"{len(treated)} of {len(rows)} variables, {elements[0]:,} of {elements[1]:,} elements, "
        f"are {treatment}:"
    ]
    widths = [max(len(str(row[column])) for row in rows) for column in (0, 1)]
    for path, shape, reason in rows:
        if reason is not None:
            answer, why = "no", f"excluded: {reason}"
        elif len(shape) <= 1:
            answer, why = "no", "one dimension or none"
        else:
            answer, why = "yes", "two or more dimensions"
        lines.append(f"  {answer:3}  {path:{widths[0]}}  {shape!s:{widths[1]}}  {why}")
    return "\n".join(lines)
