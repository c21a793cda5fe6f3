"""Names of flags that people may type and the project does not have, with what to use instead."""

# Names of flags in earlier versions of transformers and TRL, and their names today.
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps: a value below 1 is a share of all steps",
}
# Flags of other programs, and what does the same here.
FLAGS_INSTEAD = {
    "dataset_name": ("data_path", "dataset", "datasets", "train_file"),
    "dataset_streaming": ("streaming",),
    "dataset_test_split": ("validation_file",),
    "learning_rate": ("lr",),
    "load_in_4bit --use_peft": ("quantization_bit",),
    "lora_r": ("lora_rank",),
    "max_eval_samples": ("val_set_size",),
    "max_length": ("block_size", "cutoff_len", "sequence_len"),
    "model_name_or_path": ("base_model", "model", "model_id", "model_name"),
    "packing": ("sample_packing",),
    "per_device_train_batch_size": ("batch_size", "micro_batch_size"),
    "use_cpu": ("no_cuda",),
    "use_peft": ("finetuning_type", "use_lora"),
    "attn_implementation flash_attention_2": ("flash_attn", "flash_attention", "use_flash_attention_2", "use_flash_attn"),
    "train_sampling_strategy group_by_length": ("group_by_length",),
}
INSTEAD = {name: f"pass --{flag}" for flag, names in FLAGS_INSTEAD.items() for name in names} | {
    "cpu_offload": "use a config with fsdp_offload_params: true, such as 1x3090_offload",
    "early_stopping_patience": "give the trainer of the recipe a transformers.EarlyStoppingCallback",
    "max_restarts": "./launch.sh reads it, and torchrun has an option of its own",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "num_cpu_threads_per_process": "set the variable OMP_NUM_THREADS",
    "nproc_per_node": "set the variable NPROC_PER_NODE",
    "num_gpus": "the config says how many there are: set the variable NPROC_PER_NODE for another number per node",
    "num_processes": "the config says how many there are: set the variable NPROC_PER_NODE for another number per node",
    "overwrite_output_dir": "nothing is overwritten: pass another --output_dir, or move that folder away",
    "resume": "the same command resumes from the newest checkpoint in --output_dir: leave it out",
    **dict.fromkeys(
        ("tokenizer", "tokenizer_name", "tokenizer_name_or_path"), "pass processing_class= to the trainer in the recipe"
    ),
    "use_mps_device": "PyTorch uses Apple's GPU by itself: leave it out",
}
# Flags of a run that --merge does not have.
INSTEAD_IN_MERGE = dict.fromkeys(
    ("push_to_hub", "hub_model_id", "hub_private_repo"),
    "upload the merged folder: `.venv/bin/hf upload OWNER/NAME RUN/merged --private`",
)
