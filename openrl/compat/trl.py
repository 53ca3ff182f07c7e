"""TRL: its flags."""

from openrl.extension_points import flag_names
from openrl.flags.elsewhere import FlagNames, MissingFlag

DEEPSPEED = MissingFlag(
    "most of DeepSpeed's settings have flags of their own",
    "--zero_stage and the like, and --ds_config_overrides for the others",
    ("train_ppo_ray", "train_sft", "train_rm", "train_dpo"),
)

flag_names.add(
    "TRL",
    FlagNames(
        meaning={
            "model_name_or_path": "pretrain",
            "dataset_name": "prompt_data",
            "output_dir": "save_path",
            "num_generations": "n_samples_per_prompt",
            "environment_factory": "agent_func_path",
            "max_prompt_length": "prompt_max_len",
            "max_completion_length": "generate_max_len",
            "max_seq_length": "max_len",
            "per_device_train_batch_size": "micro_train_batch_size",
            "num_train_epochs": "num_episodes",
            "weight_decay": "l2",
            "max_grad_norm": "max_norm",
            "beta": "init_kl_coef",
            "epsilon": "eps_clip",
            "lora_r": "lora_rank",
            "fp16": "param_dtype",
            "torch_dtype": "param_dtype",
            "report_to": "track_with",
        },
        missing={
            "gradient_accumulation_steps": MissingFlag(
                "it follows from --train_batch_size, --micro_train_batch_size and the number of"
                " ranks",
                "leave it out",
                DEEPSPEED.commands,
            ),
            "deepspeed": DEEPSPEED,
            "deepspeed_config": DEEPSPEED,
            "ds_config": DEEPSPEED,
        },
    ),
)
