"""How close AUTO's interval comes to the ideal one where iterations vary."""
