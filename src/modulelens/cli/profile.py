"""`modulelens profile`: where the module's time, FLOPs and memory go."""

from __future__ import annotations

import msgspec

from modulelens.cli.command import LIMIT, REF, REPO, Command, Option, Reply
from modulelens.cli.repos import open_entry, with_repo
from modulelens.records import Profile
from modulelens.report.profile import profile_report


def run(*, ref: str, repo: str | None, limit: int, trace_file: str | None) -> Reply:
    """Profiles one entry; the answer keeps the `limit` operators with the most self time."""
    entry = open_entry(ref, repo)
    profile = entry.profile(trace_file=trace_file)
    name = f"{entry.name}@v{entry.version}"
    longest = sorted(profile.ops, key=lambda op: op.self_s, reverse=True)[:limit]
    return Reply(
        msgspec.structs.replace(profile, ops=tuple(longest)),
        profile_report(profile, name=name, limit=limit),
        next=[with_repo(f"bench {ref}", repo)],
    )


COMMAND = Command(
    run,
    "Profile the module: latency, FLOPs, memory, operators.",
    "modulelens profile dlrm/over_arch --trace-file over_arch.json",
    Profile,
    arguments=(REF,),
    options=(
        REPO,
        LIMIT,
        Option("--trace-file", str, "Write a Chrome trace for Perfetto.", metavar="FILE"),
    ),
)
