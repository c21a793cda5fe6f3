"""Reads an Accelerate YAML. Refuses keys and values that accelerate would ignore or misread without an error."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from harness.messages import UserError

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

OWN_KEYS = {"fsdp_reshard_after_backward", "fsdp_reduce_each_batch", "fsdp_reduce_dtype"}


class Keys(BaseModel):
    """Keys of a YAML, with the type or the possible values of each. Other keys are refused. Every key may be null."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def leave_out_null(cls, keys: Any) -> Any:
        if isinstance(keys, dict):
            return {key: value for key, value in keys.items() if value is not None}
        return keys


class FsdpKeys(Keys):
    """What accelerate 1.15 reads for FSDP2 (utils/launch.py, FullyShardedDataParallelPlugin), and OWN_KEYS."""

    fsdp_version: Literal[2]
    fsdp_auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP"]  # one FSDP unit per transformer layer
    fsdp_transformer_layer_cls_to_wrap: str = ""  # names with commas between them, without spaces
    fsdp_reshard_after_forward: bool = True
    fsdp_offload_params: bool = False
    fsdp_cpu_ram_efficient_loading: bool = False
    fsdp_activation_checkpointing: bool = False
    fsdp_activation_checkpointing_offload: bool = False
    fsdp_state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = "FULL_STATE_DICT"
    fsdp_ignored_modules: str = ""  # a regular expression
    # Of this project: accelerate ignores them, run/sharding.py reads them.
    fsdp_reshard_after_backward: bool = True
    fsdp_reduce_each_batch: bool = False
    fsdp_reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class ParallelismKeys(Keys):
    """Tensor, context and sequence parallelism are not supported."""

    parallelism_config_dp_replicate_size: PositiveInt = 1
    parallelism_config_dp_shard_size: PositiveInt = 1
    parallelism_config_tp_size: Literal[1] = 1
    parallelism_config_cp_size: Literal[1] = 1
    parallelism_config_sp_size: Literal[1] = 1


class TopKeys(Keys):
    """What a run needs, `accelerate config` writes, or launch.sh sets."""

    compute_environment: str = ""
    debug: bool = False
    distributed_type: Literal["FSDP", "MULTI_GPU", "NO"]  # without quotes, `NO` and `no` are false in YAML
    downcast_bf16: bool | str = "no"
    enable_cpu_affinity: bool = False
    fsdp_config: FsdpKeys | None = None
    gpu_ids: Annotated[str, Field(pattern=r"^(all|[0-9]{1,3}(, ?[0-9]{1,3})*)$")] | int = "all"
    machine_rank: int = 0
    main_process_ip: str = ""
    main_process_port: int = 0
    main_training_function: str = ""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    num_machines: PositiveInt = 1
    num_processes: PositiveInt = 1
    parallelism_config: ParallelismKeys = ParallelismKeys()
    rdzv_backend: str = ""
    same_network: bool = True
    tpu_env: list = []
    tpu_use_cluster: Literal[False] = False
    tpu_use_sudo: Literal[False] = False
    use_cpu: bool = False

    @model_validator(mode="after")
    def check_contradictions(self) -> "TopKeys":
        """Raises ValueError for what accelerate would ignore, or do in another way than the file says."""
        fsdp = self.fsdp_config
        if (self.distributed_type == "FSDP") != (fsdp is not None):
            raise ValueError("fsdp_config and distributed_type: FSDP need each other")
        if fsdp and not fsdp.fsdp_reshard_after_backward:
            if fsdp.fsdp_reshard_after_forward:
                raise ValueError("fsdp_reshard_after_backward: false needs fsdp_reshard_after_forward: false")
            if fsdp.fsdp_reduce_each_batch:
                raise ValueError("fsdp_reduce_each_batch saves memory that fsdp_reshard_after_backward: false uses: set only one")
        if fsdp and fsdp.fsdp_activation_checkpointing_offload and not fsdp.fsdp_activation_checkpointing:
            raise ValueError("fsdp_activation_checkpointing_offload: true needs fsdp_activation_checkpointing: true")
        if self.num_processes % self.num_machines:
            raise ValueError("num_processes counts all machines, so it must be a multiple of num_machines")
        if self.distributed_type == "NO" and self.num_processes > 1:
            raise ValueError("distributed_type NO is one process: use FSDP or MULTI_GPU for several")
        if self.use_cpu and self.distributed_type != "NO":
            raise ValueError('use_cpu: true needs distributed_type: "NO"; pass --use_cpu to compute on the CPU with this config')
        return self


@dataclasses.dataclass
class AccelerateConfig:
    """An Accelerate YAML. The defaults describe a run without one."""

    path: str = ""
    distributed_type: str = ""  # FSDP, MULTI_GPU or NO; "" without a YAML
    num_processes: int = 1  # on all machines
    num_machines: int = 1
    mixed_precision: str | None = None  # "no", "bf16", "fp16"; None when the YAML does not say
    replicas: int = 1  # of a hybrid config
    shards: int = 1  # in each replica of a hybrid config; 1 in any other config
    offload_params: bool = False
    reshard_after_backward: bool = True
    reduce_each_batch: bool = False
    reduce_dtype: str = "float32"
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    cpu_ram_efficient_loading: bool = False
    use_cpu: bool = False
    gpu_ids: str = ""  # numbers of the GPUs to use, such as "0,2"; "" for all that are visible

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def is_fsdp(self) -> bool:
        return self.distributed_type == "FSDP"

    @property
    def is_hybrid(self) -> bool:
        return self.replicas * self.shards > 1


def read(path: str) -> AccelerateConfig:
    """Reads the YAML at `path`; "" is a run without one.

    Raises UserError with everything that is wrong with its keys: accelerate would ignore them, and train in another way.
    """
    if not path:
        return AccelerateConfig()
    file = Path(path).name
    try:
        keys = TopKeys.model_validate(read_yaml(path, file))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors(include_input=False)]
        raise UserError(
            f"{file}: {'; '.join(problems)} (a config for FSDP1 or DeepSpeed: "
            "docs/memory-and-strategies.md#fsdp1-and-deepspeed-terms)"
        ) from error
    given = keys.model_dump(exclude_unset=True)
    values = given | {key.removeprefix("fsdp_"): value for key, value in given.get("fsdp_config", {}).items()}
    values["path"] = path
    values["replicas"] = keys.parallelism_config.parallelism_config_dp_replicate_size
    values["shards"] = keys.parallelism_config.parallelism_config_dp_shard_size
    values["gpu_ids"] = str(keys.gpu_ids).replace(" ", "").replace("all", "")
    names = AccelerateConfig.__dataclass_fields__.keys() & values.keys()
    return AccelerateConfig(**{name: values[name] for name in names})


def read_yaml(path: str, name: str) -> dict[str, Any]:
    """The keys and values of a YAML file. Raises UserError, with `name`, if it has others, or a key twice."""
    try:
        with Path(path).open(encoding="utf-8") as file:  # whose name and lines are in the messages
            return dict(yaml.load(file, Loader=UniqueKeyLoader) or {})
    except (OSError, ValueError, RecursionError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{name}: not a readable YAML file of keys and values: {error}") from error


class UniqueKeyLoader(yaml.SafeLoader):
    """Loads YAML in which every key is a text, and is there once: PyYAML takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                problem = f"the key {key!r} is {'there twice' if key in seen else 'no text'}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)
