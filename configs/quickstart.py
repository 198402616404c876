"""The digits world in minutes on two CPU cores: one sparse model reads, sees, hears, draws, films and speaks."""

from ernie5_jax.config import ExperimentConfig, SourceConfig, to_config_dict, to_plain


def get_config():
    config = to_config_dict(ExperimentConfig(name="quickstart"))
    with config.unlocked():
        config.data.sources.digits = to_plain(SourceConfig(world="digits"))
        config.data.task_weights = {
            "image_generation": 0.09,
            "image_caption": 0.34,
            "speech_generation": 0.34,
            "speech_caption": 0.10,
            "video_generation": 0.09,
            "text": 0.04,
        }
    config.visual.training.steps = 310
    config.data.visual_corruption = 0.2
    config.data.audio_corruption = 0.1
    config.model.hidden_size = 128
    config.model.num_moe_layers = 7
    config.model.levels_per_codec_layer = 2
    config.model.router.num_experts = 32
    config.model.router.top_k = 4
    config.model.router.bias_update_speed = 2e-3
    config.model.expert_width = 48
    config.model.shared_expert_width = 96
    config.model.dense_width = 128  # of the MTP block
    config.model.rope_base = 10_000.0
    config.sequence.length = 128
    config.sequence.text_targets = 104
    config.sequence.visual_inputs = 112
    config.sequence.visual_targets = 112
    config.sequence.understand_inputs = 64
    config.sequence.audio_inputs = 64
    config.sequence.audio_targets = 64
    config.sequence.audio_level_weights = (2.0, 1.0, 0.5, 0.5)  # the first levels decide what is understood
    config.training.steps = 760
    config.training.batch_rows = 20
    config.training.log_every = 10
    config.training.checkpoint_every = 200
    config.optimizer.learning_rate = 2e-3
    config.optimizer.end_learning_rate = 2e-4
    config.optimizer.warmup_steps = 60
    config.optimizer.decay_fraction = 0.3
    config.loss.fixed_weights = {"text": 4.0, "audio": 1.5}
    config.parallel.data = 2
    config.generation.guidance = 1.5
    config.generation.audio_temperature = 0.5
    config.generation.video_frames = 5
    return config
