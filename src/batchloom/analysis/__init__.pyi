from .explanation import (
    ExplainedSequence as ExplainedSequence,
    ExplainedSpan as ExplainedSpan,
    explain as explain,
)
from .inspection import Inspection as Inspection, inspect as inspect
from .path_check import check as check
from .plan_forecast import (
    PlanForecast as PlanForecast,
    SourceForecast as SourceForecast,
    forecast_plan as forecast_plan,
)
from .serving_steps import (
    ServedSequence as ServedSequence,
    find_serving_steps as find_serving_steps,
    when as when,
)
