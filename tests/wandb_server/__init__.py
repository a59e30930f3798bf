"""A stand-in for the W&B server, on loopback, for SDK-contract tests.

It answers the unmodified wandb SDK as far as ModuleLens uses it, from operation texts that are
public. What passes here shows that client and SDK fit together; it proves nothing about W&B itself,
whose rules (deduplication, alias protection, permissions, filter dialect, limits) aren't public.

    from tests.wandb_server import serving

    def test_something(tmp_path):
        with serving(tmp_path) as server:             # own process; os.environ is set meanwhile
            with wandb.init(entity=server.entity, project="p") as run:
                ...                                   # registries: org `server.org`
            server.operations()["LinkArtifact"]       # Counter of GraphQL operations
            server.calls("LinkArtifact")              # their variables and headers, in order
            server.bytes()["put_bytes"]               # payload traffic; report()["blobs"]: of each
            server.fail("put", "blob/", n=1, status=503)    # faults: see `faults.py`
            server.fail("gql", "LinkArtifact", drop=True, after=True)   # done, but reply lost
            server.set(latency_s=0.04)                # options: `options.Options`
            server.kill(); server.start()             # same port and state
            subprocess.run(..., env=server.env)       # a child with its own wandb service

Entities: `team` (in the organization "Test Org", whose entity is `test-org`), `tester` (a person in
it), `loner` (a person in none). Keys: `server.key` writes, `server.read_key` may only read; any
other key gets 401. `features={"NAME": False}` switches a server feature off, `search_lag_s` lets a
link show up late in searches. The server runs on after a client was killed, and ends with the test.

An operation, field, argument or URL that it doesn't know is a GraphQL error (or 404) naming it, is
listed in `server.unknown`, and makes `serving` raise at its end. `forget()` takes that back.
"""

from tests.wandb_server.serving import Server, serving

__all__ = ["Server", "serving"]
