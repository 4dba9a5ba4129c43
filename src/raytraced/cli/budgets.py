"""What --stop, --experts and --effort ask of a model: one `stop`, or one line that names the option that does not fit."""

from typing import TYPE_CHECKING, Any

from raytraced.errors import require

if TYPE_CHECKING:
    from raytraced.models.output import Model


def check_budget_options(model: "Model", source: str, **options: Any) -> None:
    """Refuse options that a model does not have.

    Args:
        model: The model.
        source: Where it was loaded from, as `raytraced calibrate` takes it.
        options: Options that say which experts run, such as `stop`, by name; None where one is not given.
    """
    from raytraced.training.calibration import has_dial

    asked = {name: value for name, value in options.items() if value is not None}
    for name, value in asked.items():
        rule = f"only for models that answer along the way, {model.name} does not; leave it out"
        require(model.answers_along_the_way, name, value, rule)
    for name in ("experts", "effort"):
        value, has_table = asked.get(name), bool(model.card.dial)
        require(value is None or "stop" not in asked, name, value, "give either stop or a budget, not both")
        rule = f"has no effect on {model.name}, which has no budget of this kind; leave it out"
        require(value is None or has_table or has_dial(model), name, value, rule)
        rule = f"the card of {model.name} has no table of budgets; run `raytraced calibrate {source}` first"
        require(value is None or has_table, name, value, rule)


def check_without_route(option: str, **options: Any) -> None:
    """Refuse options that say which experts run beside a recorded route, which says so too.

    Args:
        option: The option that gives the route.
        options: The others by name; None where one is not given.
    """
    for name, value in options.items():
        require(value is None, name, value, f"must be left out with {option}, which says what runs")
