from .mixture_spec import (
    PlanStore as PlanStore,
    is_positive_weight as is_positive_weight,
    list_weight_problems as list_weight_problems,
    list_weighted_sources as list_weighted_sources,
)
