"""OpenRLHF: its flags and metrics."""

from openrl.extension_points import flag_names, metric_names
from openrl.flags.elsewhere import FlagNames, MissingFlag

TRAINING = ("train_ppo_ray", "train_sft", "train_rm", "train_dpo")
NEVER_READ = MissingFlag("OpenRLHF itself never reads it")
ONE_PROCESS = MissingFlag("one process holds the whole model", commands=("batch_inference",))

flag_names.add(
    "OpenRLHF",
    FlagNames(
        missing={
            "actor_init_on_gpu": NEVER_READ,
            "perf": NEVER_READ,
            "train_split": NEVER_READ,
            "zero_stage": ONE_PROCESS,
            "local_rank": ONE_PROCESS,
            "deepcompile": MissingFlag("DeepSpeed runs without DeepCompile", commands=TRAINING),
            "dataloader_num_workers": MissingFlag(
                "rows are tokenised before training", commands=TRAINING
            ),
            "vllm_sync_with_ray": MissingFlag(
                "vLLM's own weight transfer moves the weights", commands=("train_ppo_ray",)
            ),
            "expand_n_samples": MissingFlag(
                "each answer to a prompt is already a separate request",
                commands=("train_ppo_ray",),
            ),
            "use_ds_universal_ckpt": MissingFlag(
                "checkpoints resume with other ranks and ZeRO stages as they are",
                commands=TRAINING,
            ),
            "ref_offload": MissingFlag(
                "the reference reads all rows before training begins and is then removed",
                commands=("train_dpo",),
            ),
            "num_cpus_for_local_task": MissingFlag(
                "rewards and agents run beside the engines and need no CPUs reserved",
                commands=("train_ppo_ray",),
            ),
            "load_model": MissingFlag(
                "a model is a directory or a Hub name", "--pretrain DIRECTORY"
            ),
        },
    ),
)

metric_names.add(
    "OpenRLHF",
    {
        "train/policy_loss": "actor/policy_loss",
        "train/ppo_kl": "actor/ppo_kl",
        "train/ppo_clip_ratio": "actor/clip_fraction",
        "train/kl": "actor/kl",
        "train/actor_lr": "actor/lr",
        "train/critic_loss": "critic/value_loss",
        "train/critic_lr": "critic/lr",
        "train/values": "critic/value",
        "train/reward": "rollout/reward",
        "train/return": "rollout/return",
        "train/response_length": "rollout/response_length",
        "train/truncated": "rollout/truncated_share",
    },
)
