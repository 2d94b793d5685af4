from .mixture import (
    Mixture as Mixture,
    PlanStore as PlanStore,
    Schedule as Schedule,
    SourceSpec as SourceSpec,
    Stage as Stage,
    list_weight_problems as list_weight_problems,
    list_weighted_sources as list_weighted_sources,
)
from .order.assumed_lengths import parse_assumed_stores as parse_assumed_stores
from .order.document_positions import find_document_positions as find_document_positions
from .order.edits import Edit as Edit
from .order.plan import Plan as Plan, with_journal as with_journal
from .order.rank_slices import (
    Mesh as Mesh,
    check_world as check_world,
    compute_imbalance as compute_imbalance,
    compute_row_costs as compute_row_costs,
    deal_balanced as deal_balanced,
    deal_contiguous as deal_contiguous,
    rank_positions as rank_positions,
    slice_indices as slice_indices,
)
from .packing.plan_spec import ORDER_VERSION as ORDER_VERSION, PlanSpec as PlanSpec
from .packing.pools import Permutation as Permutation, Pools as Pools
from .packing.strategies import compute_min_sequences as compute_min_sequences, count_sequences as count_sequences
