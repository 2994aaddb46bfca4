// What Furo and Sphinx leave out for people who use a keyboard or a screen reader.
for (const one of document.querySelectorAll("p.caption[role=heading]")) one.ariaLevel = 2;
for (const [place, name] of [["sidebar", "All pages"], ["toc", "On this page"]])
  document.querySelector(`.${place}-drawer`)?.setAttribute("aria-label", name);
for (const one of document.querySelectorAll("pre, .table-wrapper")) one.tabIndex = 0; // scrolls
