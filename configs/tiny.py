"""A model that needs nothing prepared and reaches its first step within a minute; elastic masks are on."""

from configs import quickstart
from ernie5_jax.config import SourceConfig, to_plain


def get_config():
    config = quickstart.get_config()
    config.name = "tiny"
    with config.unlocked():
        config.data.sources = {"tiny": to_plain(SourceConfig(world="tiny"))}
        config.data.task_weights = {}
    config.model.hidden_size = 32
    config.model.num_heads = 2
    config.model.num_kv_heads = 1
    config.model.head_dim = 16
    config.model.num_moe_layers = 3
    config.model.router.num_experts = 8
    config.model.router.top_k = 2
    config.model.expert_width = 16
    config.model.shared_expert_width = 16
    config.model.dense_width = 32
    config.text.vocab_size = 384
    config.model.vocab_size = 384
    config.visual.channels = (12, 16)
    config.visual.res_blocks = 0
    config.visual.bits = 6
    config.model.visual_bits = 6
    config.model.vision_feature_dim = 16
    config.visual.training.steps = 30
    config.visual.training.batch_size = 8
    config.audio.bins = 32
    config.audio.hidden_size = 32
    config.audio.num_blocks = 1
    config.audio.code_dim = 8
    config.model.audio_bins = 32
    config.audio.training.steps = 30
    config.audio.training.batch_size = 8
    config.audio.griffin_lim_iterations = 8
    config.sequence.length = 160
    for key in (
        "text_targets",
        "visual_inputs",
        "visual_targets",
        "understand_inputs",
        "audio_inputs",
        "audio_targets",
    ):
        config.sequence[key] = 0
    config.training.steps = 200
    config.training.batch_rows = 4
    config.training.micro_batches = 2
    config.training.log_every = 1
    config.training.checkpoint_every = 20
    config.optimizer.warmup_steps = 10
    config.elastic.full_depth = 0.75
    config.elastic.full_width = 0.8
    config.elastic.full_top_k = 0.8
    config.elastic.min_experts = 2
    config.parallel.data = 1
    config.evaluation.judge_steps = 30
    config.evaluation.samples = 20
    config.evaluation.videos = 10
    return config
