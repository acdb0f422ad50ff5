"""Shared by the plot scripts: matplotlib without a display, and saving figures. Use it in a script that draws, so
that a missing matplotlib or a wrong --out ends in one line; `fail` is the script's function that prints it."""


def pyplot(fail):
    try:
        import matplotlib
        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError:
        fail("matplotlib is missing: run dev/venv.sh and use .venv/bin/python")
    return pyplot


def save(figure, out, fail):
    """Saves the figure in the format of its file name's extension, and closes it."""
    from matplotlib import pyplot
    try:
        figure.savefig(out, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        fail(f"--out {out}: {error}")
    pyplot.close(figure)
