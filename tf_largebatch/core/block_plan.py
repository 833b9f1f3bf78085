"""All-reduce by binary blocks: recursive halving and doubling for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tf_largebatch.core.plan_parts import (
    IDLE,
    AllReducePlan,
    Cut,
    Step,
    Steps,
    halving_steps,
    segment,
    with_gather,
)
from tf_largebatch.core.scaling import require_count


def binary_blocks(num_workers: int, *, length: int, align: int = 1) -> AllReducePlan:
    """Halving and doubling in blocks of ranks whose sizes are the powers of two in p.

    Each block halves recursively by itself. Then, from the smallest block up, the sums of a block
    are added into those of the next larger one: a rank of the smaller block holds the segments of
    several ranks of the larger, and sends each its own. A block of `2**a` ranks is ready after a
    steps, and receives in the next one, while larger blocks still halve; so all is added up after
    `floor(log2 p) + 1` steps. The way back is the mirror image: `2 floor(log2 p) + 2` steps.
    Where p is a power of two there is one block, and the steps are those of `halving_doubling`.

    Args:
        num_workers: p, at least 1.
        length: elements in the buffer; 0 gives a plan without transfers.
        align: edges between pieces are multiples of this many elements; pieces may get empty.

    Raises:
        ConfigurationError: a count is no integer or too small.
    """
    p = require_count("num_workers", num_workers)
    blocks = _blocks(p)
    parts = blocks[0].size
    cut = Cut(require_count("length", length, minimum=0), parts, require_count("align", align))
    num_scatter_steps = blocks[0].exponent + (len(blocks) > 1)

    def make_steps(rank: int) -> Steps:
        scatter = [IDLE] * num_scatter_steps
        for index, step in _block_scatter(cut, blocks, rank).items():
            scatter[index] = step
        return with_gather(scatter)

    return AllReducePlan("binary_blocks", p, cut.length, 2 * num_scatter_steps, make_steps)


@dataclass(frozen=True)
class _Block:
    """`2**exponent` ranks from `first_rank` on."""

    first_rank: int
    exponent: int

    @property
    def size(self) -> int:
        return 1 << self.exponent


def _blocks(num_workers: int) -> list[_Block]:
    """Largest first."""
    blocks: list[_Block] = []
    rest = num_workers
    while rest:
        exponent = rest.bit_length() - 1
        blocks.append(_Block(num_workers - rest, exponent))
        rest -= 1 << exponent
    return blocks


def _block_scatter(cut: Cut, blocks: list[_Block], rank: int) -> dict[int, Step]:
    """The steps of the reduce-scatter in which `rank` has something to do, by their number."""
    number = max(i for i, block in enumerate(blocks) if block.first_rank <= rank)
    block = blocks[number]
    position = rank - block.first_rank
    halving = halving_steps(cut, position, halvings=block.exponent, first_rank=block.first_rank)
    scatter = dict(enumerate(halving))
    # The low bits of a position decide on the first halvings, and all blocks share those: the
    # segments inside this rank's are those of the larger block's ranks with the same low bits.
    if number + 1 < len(blocks):
        smaller = blocks[number + 1]
        sender = smaller.first_rank + position % smaller.size
        kept = cut.pieces(sender, *segment(position, block.exponent, cut.parts))
        scatter[block.exponent] = Step(sends=(), receives=kept, reduce=True)
    if number > 0:
        larger = blocks[number - 1]
        given = tuple(
            piece
            for receiver in range(position, larger.size, block.size)
            for piece in cut.pieces(
                larger.first_rank + receiver, *segment(receiver, larger.exponent, cut.parts)
            )
        )
        scatter[larger.exponent] = Step(sends=given, receives=(), reduce=True)
    return scatter
