from .mixture_spec import (
    Mixture as Mixture,
    PlanStore as PlanStore,
    SourceSpec as SourceSpec,
    Stage as Stage,
    Weights as Weights,
    is_positive_weight as is_positive_weight,
    list_weight_problems as list_weight_problems,
    list_weighted_sources as list_weighted_sources,
    uses_size_weights as uses_size_weights,
)
from .period_shares import (
    EpochCap as EpochCap,
    SourceStatistics as SourceStatistics,
    apportion as apportion,
    compute_sequence_shares as compute_sequence_shares,
    flatten_weights as flatten_weights,
    measure_source as measure_source,
)
from .schedule import Schedule as Schedule, make_schedule as make_schedule
