"""When an answer is right: written rules first, math-verify in killable processes for the rest, a second opinion beside."""
