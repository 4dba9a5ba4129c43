"""The colours of every figure: Okabe and Ito's, which colour-blind eyes tell apart, on white and on dark."""

INK, FAINT = "#222222", "#6B7280"
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
YELLOW, SKY, GREY = "#E69F00", "#56B4E9", "#7F7F7F"
