"""The simulated part of a run: from the wrapped model to the end of a step, and what comes after a run."""

from harness.plan import arithmetic
from harness.plan.arithmetic import local
from harness.plan.ledger import Ledger

import torch
import transformers


class Enough(BaseException):
    """The step is over."""


class Step(transformers.TrainerCallback):
    """Enters the simulation when the model is wrapped, and leaves it after one optimizer step and what comes after a run."""

    def __init__(self, trainer, config: dict, ledger: Ledger, fakes, batch: dict, found: dict, to_the_end: bool):
        self.trainer, self.ledger, self.fakes, self.batch, self.found = trainer, ledger, fakes, batch, found
        self.to_the_end = to_the_end
        policy = getattr(getattr(trainer.accelerator.state, "fsdp_plugin", None), "cpu_offload", None)
        self.offloaded = isinstance(policy, torch.distributed.fsdp.CPUOffloadPolicy)
        # One micro-batch, added to the gradients of earlier ones, is the last of many. Where FSDP keeps gradients whole until the
        # last one, nobody else can put them there: then it is two.
        args, fsdp = trainer.args, config.get("fsdp_config", {})
        self.earlier = args.gradient_accumulation_steps > 1
        keeps = self.earlier and fsdp and not fsdp.get("fsdp_reduce_each_batch")
        self.micro_batches = args.gradient_accumulation_steps = 2 if keeps else 1
        trainer.get_batch_samples, self.parts = self._batches, []

    def _batches(self, iterator, count, device):
        samples = [{name: self.fakes.fake(value) for name, value in self.batch.items()} for _ in range(self.micro_batches)]
        return samples, self.trainer._get_num_items_in_batch(samples, device)

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        ledger, trainer = self.ledger, self.trainer
        for weight in model.parameters():
            ledger.mark(local(weight), "weights")
        inner = trainer.optimizer.optimizer
        self.place = "host" if self.offloaded else "gpu"
        with self.fakes.here(moment="first step", holder="optimizer", place=self.place):
            trained = [weight for group in inner.param_groups for weight in group["params"]]
            for weight in trained:
                weight.grad = torch.zeros_like(weight)
            inner.step()
            for tensor in self._states():
                ledger.mark(tensor, "optimizer")
            if self.micro_batches == 2 or not self.earlier:
                inner.zero_grad()
            for weight in trained:
                if weight.grad is not None:
                    ledger.mark(local(weight.grad), "gradients")
        arithmetic.compare("weights", [local(w) for w in model.parameters()], self.found["expected"]["weights"])
        if "adam" in str(args.optim):
            arithmetic.compare("optimizer states", self._states(), self.found["expected"]["optimizer"])
        self.trained = trained
        ledger.count()
        step, backward, clip = inner.step, trainer.accelerator.backward, trainer._clip_grad_norm

        def stepping(*arguments, **options):
            with ledger.within(moment="optimizer step", holder="rest", place=self.place):
                gradients = [local(weight.grad) for weight in trained]
                for gradient in gradients:
                    ledger.mark(gradient, "gradients")
                arithmetic.compare("gradients", gradients, self.found["expected"]["gradients"])
                return step(*arguments, **options)

        def clipping(*arguments):
            with ledger.within(moment="optimizer step", holder="rest", place=self.place):
                return clip(*arguments)

        def going_back(*arguments, **options):
            with ledger.within(moment="backward", holder="activations"):
                result = backward(*arguments, **options)
            self.parts.append(ledger.count())
            return result

        inner.step, trainer.accelerator.backward, trainer._clip_grad_norm = stepping, going_back, clipping
        self.entered = self.fakes.here(moment="forward", holder="activations")
        self.entered.__enter__()

    def _states(self):
        states = self.trainer.optimizer.optimizer.state.values()
        return [local(v) for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        ledger, trainer = self.ledger, self.trainer
        after = ledger.count()  # of the last micro-batch: clipping and the optimizer
        self.found["offloaded"], self.found["trained_here"] = self.offloaded, sum(local(w).numel() for w in self.trained)
        self.found["step"] = arithmetic.whole_step(self.parts, self.found["accumulation"])
        self.found["step"]["touched"] += after["touched"]
        wrapped = trainer.model_wrapped
        wrapped.eval()
        if trainer.eval_dataset is not None and self.to_the_end:
            rows = args.per_device_eval_batch_size / args.per_device_train_batch_size
            with ledger.within(moment="evaluation"):
                trainer.prediction_step(wrapped, _rows(self.batch, rows, self.fakes), True)
        if self.to_the_end:
            with ledger.within(moment="sample"), torch.no_grad():
                prompt = torch.ones(1, getattr(args, "max_length", None) or 512, dtype=torch.long)
                trainer.model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        with ledger.within(moment="save", holder="gathered"), torch.no_grad():
            ledger.spike(1, "rest")  # unsharded, it needs no more than is there
            for unit in [module for module in model.modules() if isinstance(module, torch.distributed.fsdp.FSDPModule)]:
                unit.reshard()
            for weight in model.parameters():
                if hasattr(weight, "full_tensor") and (weight.requires_grad or not self.found["adapter"]):
                    weight.full_tensor()  # one after the other, to the host
        raise Enough


def _rows(batch: dict, share: float, fakes) -> dict:
    """The batch with another number of rows."""
    flat = "position_ids" in batch
    cut = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            shape = (1, int(value.shape[1] * share)) if flat else (max(1, int(value.shape[0] * share)), value.shape[1])
            value = torch.ones(shape, dtype=value.dtype)
        cut[name] = fakes.fake(value)
    return cut
