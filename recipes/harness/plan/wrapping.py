"""Where FSDP2 would copy between host and GPU, and what DDP asks of its other processes. See `fakes`."""

import torch


def offload(ledger):
    """With offload, host and GPU are both the CPU here: what crosses is told by where FSDP would copy."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group

    shard_class = _fsdp_param.FSDPParam
    inputs, init, reduce = (
        shard_class.all_gather_inputs.fget,
        shard_class._init_sharded_param,
        _fsdp_param_group.foreach_reduce,
    )

    def move(params, buffers, device):
        for tensor in (*params, *buffers):
            with torch.no_grad(), ledger.within(place="gpu"):
                tensor.data = tensor.data.clone()

    def init_sharded(param, *arguments):
        with ledger.within(place="host" if param.offload_to_cpu else "gpu"):
            init(param, *arguments)

    def gather_inputs(param):
        kept = param._sharded_param_data
        if param.offload_to_cpu:
            param._sharded_param_data = kept.clone()
            ledger.mark(param._sharded_param_data, "gathered")
            ledger.moved["to_gpu"] += kept.nbytes
        try:
            return inputs(param)
        finally:
            param._sharded_param_data = kept

    def reduce_to_host(params, *arguments, **options):
        before = [param.sharded_param.grad is not None for param in params]
        result = reduce(params, *arguments, **options)
        for param, there in zip(params, before, strict=True):
            if param.offload_to_cpu and param.sharded_param.grad is not None:
                gradient = param.sharded_param.grad._local_tensor
                ledger.moved["to_host"] += gradient.nbytes
                if not there:
                    ledger.mark(gradient, "gradients", "host")
        return result

    _fsdp_init._move_states_to_device = move
    shard_class._init_sharded_param = init_sharded
    shard_class.all_gather_inputs = property(gather_inputs)
    _fsdp_param_group.foreach_reduce = reduce_to_host


def data_parallel(ledger):
    """DDP compares its processes, which is for real ones, and adds up its buckets, which are made in C++."""
    from torch.nn.parallel import distributed

    def add_up(state, bucket):
        ledger.moved["all_reduced"] += bucket.buffer().nbytes
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def wrap(model, *arguments, **options):
        original(model, *arguments, **options)
        model.register_comm_hook(None, add_up)

    original = distributed.DistributedDataParallel.__init__
    distributed._verify_param_shape_across_processes = lambda *arguments: None
    distributed._sync_module_states = lambda *arguments, **options: None
    distributed.DistributedDataParallel.__init__ = wrap


def shapes_only(ledger):
    """DTensor finds out what shape comes out of an operator by running it on whole tensors that hold nothing either."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def aside(*arguments):
        ledger.paused, kept = True, ledger.paused
        try:
            return propagate(*arguments)
        finally:
            ledger.paused = kept

    ShardingPropagator._propagate_tensor_meta_non_cached = aside
