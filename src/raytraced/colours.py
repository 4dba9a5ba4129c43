"""The colours of all figures, for light and dark backgrounds: Okabe and Ito's palette for colour-blind readers."""

INK, FAINT = "#222222", "#6B7280"
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
YELLOW, SKY, GREY = "#E69F00", "#56B4E9", "#7F7F7F"
