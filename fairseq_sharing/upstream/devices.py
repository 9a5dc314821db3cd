"""Devices: several processes and --bf16, also where there is no GPU and no TPU."""

import importlib.util

import torch


def broadcast_with_torch(broadcast, obj, src_rank, group, dist_device):
    """Send objects between workers by torch's own function.

    Upstream reads what its first worker sent with torch.load, which refuses a configuration under ``weights_only``:
    several processes can train but not resume. What is sent was loaded by the first worker, under ``weights_only``.
    """
    if not isinstance(group, torch.distributed.ProcessGroup):
        return broadcast(obj, src_rank, group, dist_device)  # TPUs have groups of their own
    box = [obj]
    torch.distributed.broadcast_object_list(box, src=src_rank, group=group, device=dist_device)
    return box[0]


def wrap_on_the_cpu(ddp, module, device_ids=None, output_device=None, **kwargs):
    """Give DistributedDataParallel no device ids for a model on the CPU.

    Upstream always gives them and torch refuses them there, so its default --ddp-backend only runs on GPUs.
    """
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        device_ids = output_device = None
    return ddp(module, device_ids=device_ids, output_device=output_device, **kwargs)


def parse_bf16_without_tpu(parse, *args, **kwargs):
    """Let --bf16 train on GPUs and CPUs.

    Upstream's parser takes --bf16 for --tpu, though nothing in its training needs one: without torch_xla it stops.
    """
    parsed = parse(*args, **kwargs)
    namespace = parsed[0] if isinstance(parsed, tuple) else parsed
    if getattr(namespace, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
        namespace.tpu = False
    return parsed
