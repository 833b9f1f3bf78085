"""A recipe in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tf_largebatch.core.recipe import Recipe


def batch_formula(recipe: Recipe) -> str:
    """The global batch as a product."""
    formula = (
        f"{recipe.global_batch_size} = {recipe.per_replica_batch_size} per replica "
        f"x {recipe.num_replicas} replicas"
    )
    if recipe.accumulation_steps > 1:
        formula += f" x {recipe.accumulation_steps} accumulated"
    return formula


def description(recipe: Recipe) -> str:
    """See `Recipe.describe`."""
    spare = recipe.num_examples - recipe.steps_per_epoch * recipe.global_batch_size
    rows = [
        ("global batch", batch_formula(recipe)),
        (
            "peak rate",
            f"{recipe.peak_learning_rate:g} = {recipe.base_learning_rate:g} "
            f"x {recipe.global_batch_size} / {recipe.base_batch_size}",
        ),
        (
            "an epoch",
            f"{recipe.steps_per_epoch} updates = {recipe.num_examples} examples / "
            f"{recipe.global_batch_size}; {spare} examples dropped",
        ),
        ("training", f"{recipe.total_steps} updates = {recipe.epochs} epochs"),
        ("warmup", _warmup_line(recipe)),
        ("decay", _decay_line(recipe)),
    ]
    lines = ["Recipe", *(f"  {name:<13} {text}" for name, text in rows), ""]
    lines.append(f"  {'update':>9}  {'epoch':>8}  {'rate':>11}")
    for step, note in sorted(_milestones(recipe).items()):
        lines.append(
            f"  {step:>9}  {step / recipe.steps_per_epoch:>8.3f}  "
            f"{recipe.learning_rate_at(step):>11.6g}  {note}"
        )
    return "\n".join(lines)


def _warmup_line(recipe: Recipe) -> str:
    if not recipe.warmup_steps:
        return "none"
    if not _ramps(recipe):
        return f"none, as the peak is not above the base rate of {recipe.base_learning_rate:g}"
    past_the_end = ", longer than training" if recipe.warmup_steps > recipe.total_steps else ""
    return (
        f"{recipe.warmup}, from {recipe.initial_learning_rate:g}, "
        f"{recipe.warmup_steps} updates = {recipe.warmup_epochs:g} epochs{past_the_end}"
    )


def _decay_line(recipe: Recipe) -> str:
    epochs = ", ".join(f"{epoch:g}" for epoch in recipe.effective_decay_epochs)
    if not epochs:
        return "none"
    # Short trial runs with the defaults for long ones; legal, but seldom what is meant.
    in_warmup = _ramps(recipe) and any(step < recipe.warmup_steps for step in recipe.decay_steps)
    note = "; NOTE: decays before the warmup ends" if in_warmup else ""
    return f"x {recipe.decay_factor:g} at epochs {epochs}{note}"


def _ramps(recipe: Recipe) -> bool:
    return recipe.initial_learning_rate < recipe.peak_learning_rate


def _milestones(recipe: Recipe) -> dict[int, str]:
    """{update: what happens there}, those within training."""
    notes: dict[int, list[str]] = {}
    notes.setdefault(0, []).append("first update")
    if recipe.warmup_steps and _ramps(recipe):
        notes.setdefault(recipe.warmup_steps - 1, []).append("last of warmup")
        notes.setdefault(recipe.warmup_steps, []).append("first after warmup")
    for step in recipe.decay_steps:
        notes.setdefault(step, []).append(f"decay x {recipe.decay_factor:g}")
    notes.setdefault(recipe.total_steps - 1, []).append("last update")
    return {step: ", ".join(note) for step, note in notes.items() if step < recipe.total_steps}
