"""What the plotting scripts share: matplotlib without a display, and files of figures. `fail` ends a script in one line."""


def pyplot(fail):
    try:
        import matplotlib
        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError:
        fail("matplotlib is missing: run dev/venv.sh and use .venv/bin/python")
    return pyplot


def save(figure, out, fail):
    """Writes it, in the format of the name's ending, and lets go of it."""
    from matplotlib import pyplot
    try:
        figure.savefig(out, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        fail(f"--out {out}: {error}")
    pyplot.close(figure)
