#!/usr/bin/env python3
"""Bus rates of NCCL collectives between the GPUs of this machine, for bench/scaling_model.py --links. Needs PyTorch with CUDA.

    links.py --out bench/results/h200x2_links.json [--gpus 2] [--mib 1024]

Bus rate as nccl-tests counts it: bytes that a rank must send, over time. Median of --repeats after three warm-ups; the sum of an all-reduce is checked.
"""

import argparse
import datetime
import json
import os
import pathlib
import socket
import statistics


def collectives(torch, dist, size, ranks):
    """name -> (call, bytes that a rank sends)"""
    whole = torch.ones(size // 4, device="cuda")
    part = torch.empty(size // 4 // ranks, device="cuda")
    other = torch.empty_like(whole)
    away = (ranks - 1) / ranks * size
    return {
        "all_reduce": (lambda: dist.all_reduce(other), 2 * away),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), away),
        "all_gather": (lambda: dist.all_gather_into_tensor(other, part), away),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole), away),
        "broadcast": (lambda: dist.broadcast(whole, 0), size),
    }


def worker(rank, ranks, port, sizes, repeats, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0")
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    check = torch.full((1024,), float(rank + 1), device="cuda")
    dist.all_reduce(check)
    assert bool((check == ranks * (ranks + 1) / 2).all()), "an all-reduce gave a wrong sum"
    rates = {}
    for size in sizes:
        for name, (call, sent) in collectives(torch, dist, size // ranks // 4 * ranks * 4, ranks).items():
            times = []
            for turn in range(repeats + 3):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                dist.barrier()
                begin.record()
                call()
                end.record()
                end.synchronize()
                times += [begin.elapsed_time(end) / 1e3] if turn >= 3 else []
            rates.setdefault(size, {})[name] = sent / statistics.median(times) / 1e9
    if rank == 0:
        queue.put(rates)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--mib", type=lambda text: [int(part) for part in text.split(",")], default=[1024, 64, 4], help="sizes; the first is the file's rate")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    import torch
    import torch.multiprocessing as multiprocessing

    gpus = options.gpus or torch.cuda.device_count()
    if gpus < 2:
        parser.error(f"expected two GPUs or more, found {gpus}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    sizes = [mib << 20 for mib in options.mib]
    multiprocessing.spawn(worker, (gpus, port, sizes, options.repeats, queue), nprocs=gpus)
    rates = queue.get()
    about = {"benchmark": "links", "date": datetime.date.today().isoformat(), "machine": f"{gpus} x {torch.cuda.get_device_name(0)} of one host",
             "command": f"bench/links.py --gpus {gpus}, PyTorch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"}  # fmt: skip
    found = {**about, "bytes": sizes[0], "bus_gb_s": rates[sizes[0]], "bus_gb_s_by_bytes": {str(size): rate for size, rate in rates.items()}}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: round(rate, 1) for name, rate in rates[sizes[0]].items()}))


if __name__ == "__main__":
    main()
