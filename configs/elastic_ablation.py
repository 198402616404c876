"""The report's ablation of elastic training at small scale: 16 layers, 64 experts, top-8, text only.

`experiments.ablation` runs it once per arm and seed; `config.elastic` is what an arm changes.
"""

from ernie5_jax.config import ExperimentConfig, SourceConfig, to_config_dict, to_plain


def get_config():
    config = to_config_dict(ExperimentConfig(name="elastic_ablation"))
    with config.unlocked():
        config.data.sources.python = to_plain(SourceConfig(world="python_source"))
    config.text.vocab_size = 1024
    config.model.vocab_size = 1024
    config.model.hidden_size = 96
    config.model.num_moe_layers = 16
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 24
    config.model.router.num_experts = 64
    config.model.router.top_k = 8
    config.model.expert_width = 16
    config.model.shared_expert_width = 0
    config.model.mtp_depth = 0
    config.model.audio_levels = 0
    config.model.rope_base = 10_000.0
    config.sequence.length = 256
    for key in ("visual_inputs", "visual_targets", "understand_inputs", "audio_inputs", "audio_targets"):
        config.sequence[key] = 1  # there is nothing but text
    config.training.steps = 600
    config.training.batch_rows = 16
    # Full and reduced models meet in one update, as in the report; the static arm accumulates over as many.
    config.training.micro_batches = 4
    config.training.log_every = 20
    config.training.checkpoint_every = 250
    config.training.evaluate_rows = 16
    config.evaluation.suite = ""
    config.optimizer.learning_rate = 3e-3
    config.optimizer.end_learning_rate = 3e-4
    config.optimizer.warmup_steps = 50
    config.parallel.data = 2
    return config
