"""Which entries are parts of one module: those of one job, and of one step of it."""

from __future__ import annotations

from modulelens.merge import is_last, merged_before, siblings
from modulelens.records import SCHEMA, Environment, Metadata


def part(version: int, rank: int, *, moment: int = 5, job: str = "job") -> Metadata:
    environment = Environment(rank=rank, world_size=2, job=job)
    return Metadata(
        schema=SCHEMA,
        model="net",
        fqn="up",
        cls="torch.nn:Linear",
        version=version,
        moment=moment,
        environment=environment,
    )


def test_two_traces_of_one_job_are_told_apart() -> None:
    first, later = part(1, 0, moment=5), part(2, 0, moment=9)
    other = part(3, 1, moment=5)
    there = [first, later, other]
    assert siblings(other, there, {0, 1}) == [first, other]
    assert siblings(later, there, {0, 1}) == [later]
    assert is_last(other, {0, 1}, there)
    assert not is_last(later, {0, 1}, there)
    assert siblings(first, [*there, part(4, 1, moment=9)], {0, 1}) == [first, other]
    assert siblings(first, [*there, part(4, 0, job="next")], {0, 1}) == [first, other]


def test_a_merge_of_another_step_was_not_before() -> None:
    def merged(version: int, moment: int) -> Metadata:
        found = part(version, 0, moment=moment)
        return type(found)(
            **{n: getattr(found, n) for n in found.__struct_fields__ if n != "merged"},
            merged=(0, 1),
        )

    assert not merged_before(merged(7, 9), [merged(3, 5)])
    assert merged_before(merged(7, 9), [merged(3, 9)])
