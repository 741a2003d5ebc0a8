"""One file per question: state and lifetime, no equations, no hooks of their own."""
