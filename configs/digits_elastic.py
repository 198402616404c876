"""`digits_recorded` as a family of submodels: layers, experts and top-k are reduced in a part of the steps.

--config.data.sources.recorded.options.folder=PATH as there; top-k 8 of narrower experts, so that a quarter is top-k 2.
"""

from configs import digits_recorded


def get_config():
    config = digits_recorded.get_config()
    config.name = "digits_elastic"
    config.model.router.top_k = 8
    config.model.expert_width = 24
    config.training.steps = 1800
    # Submodels to be had without retraining are drawn often: nested experts and evenly spaced layers are always the
    # same ones, so a run of this length still trains each of them.
    config.elastic.full_depth = 0.75
    config.elastic.min_layers = 4
    config.elastic.layer_choice = "even"
    config.elastic.full_width = 0.7
    config.elastic.min_experts = 8
    config.elastic.max_experts = 20
    config.elastic.expert_choice = "nested"
    config.elastic.full_top_k = 0.6
    config.elastic.min_top_k = 2
    config.elastic.max_top_k = 6
    return config
