from .mixture_spec import (
    Mixture as Mixture,
    PlanStore as PlanStore,
    SourceSpec as SourceSpec,
    Stage as Stage,
    Weights as Weights,
    by_size as by_size,
    is_positive as is_positive,
    weighed_in as weighed_in,
    weight_problems as weight_problems,
)
from .period_shares import (
    Caps as Caps,
    Measured as Measured,
    apportion as apportion,
    flat_weights as flat_weights,
    measure as measure,
    sequence_shares as sequence_shares,
)
from .schedule import Schedule as Schedule, schedule_of as schedule_of
