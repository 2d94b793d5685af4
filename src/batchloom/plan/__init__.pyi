from .assumed import assumed_from as assumed_from
from .bound import least_sequences as least_sequences
from .deal import (
    balanced as balanced,
    imbalance as imbalance,
    row_costs as row_costs,
    stretches as stretches,
)
from .edits import Edit as Edit
from .lane_plan import LanePlan as LanePlan
from .lanes import lane_pool_default as lane_pool_default, lane_stretches as lane_stretches
from .mixture import Mixture as Mixture, SourceSpec as SourceSpec, Stage as Stage
from .pack import count_sequences as count_sequences
from .permute import Permutation as Permutation
from .plan import Plan as Plan
from .pools import Pools as Pools
from .ranks import (
    Mesh as Mesh,
    check_world as check_world,
    rank_positions as rank_positions,
    slice_indices as slice_indices,
)
from .schedule import Schedule as Schedule
from .spec import ORDER_VERSION as ORDER_VERSION, PlanSpec as PlanSpec
from .state import with_journal as with_journal
from .when import seen as seen
