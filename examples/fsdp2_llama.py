r"""A small Llama, trained with FSDP2 (`fully_shard`) on two CPU ranks.

Trace one layer in the third step, from both ranks, without touching this file:

    torchrun --nproc-per-node 2 -m modulelens trace --ranks all --warmup 2 \
        --modules 'model.layers.0*' --repo lens -- examples/fsdp2_llama.py

Each rank stores the layer whole, with its own batch. Rebuild it in one process, without a process
group:

    modulelens ls --repo lens
    modulelens check LlamaForCausalLM/model.layers.0.mlp --repo lens
    python -c "import modulelens as ml
    print(ml.Repo('lens')['LlamaForCausalLM/model.layers.0.self_attn'].rebuild())"
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH, LENGTH = 4, 2, 16


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)  # every rank has a batch of its own
    for step in range(STEPS):
        ids = torch.randint(0, config.vocab_size, (BATCH, LENGTH))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
