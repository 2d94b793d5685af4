from .mixture.mixture_spec import Mixture as Mixture, SourceSpec as SourceSpec, Stage as Stage
from .mixture.schedule import Schedule as Schedule
from .order.assumed_lengths import assumed_from as assumed_from
from .order.document_positions import seen as seen
from .order.edits import Edit as Edit
from .order.lane_plan import LanePlan as LanePlan
from .order.lanes import lane_pool_default as lane_pool_default, lane_stretches as lane_stretches
from .order.plan import Plan as Plan
from .order.rank_slices import (
    Mesh as Mesh,
    check_world as check_world,
    rank_positions as rank_positions,
    slice_indices as slice_indices,
)
from .order.row_dealing import (
    balanced as balanced,
    imbalance as imbalance,
    row_costs as row_costs,
    stretches as stretches,
)
from .order.state_journal import with_journal as with_journal
from .packing.packing_bound import least_sequences as least_sequences
from .packing.permutation import Permutation as Permutation
from .packing.plan_spec import ORDER_VERSION as ORDER_VERSION, PlanSpec as PlanSpec
from .packing.pools import Pools as Pools
from .packing.strategies import count_sequences as count_sequences
