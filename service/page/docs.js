"use strict";

// Draws openapi.json. Text only ever becomes a text node.
const main = document.getElementById("main");
let schemas = {};

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function prose(tag, text = "") {
  const element = make(tag);
  text.split("`").forEach((part, i) => element.append(i % 2 ? make("code", part) : part));
  return element;
}

function grid(headings, lines) {
  const table = make("table");
  const head = table.createTHead().insertRow();
  for (const heading of headings) {
    const cell = make("th", heading);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const [first, ...rest] of lines) {
    const line = body.insertRow();
    const cell = make("th");
    cell.scope = "row";
    cell.append(first);
    line.append(cell);
    for (const value of rest) line.insertCell().append(value);
  }
  return table;
}

function named(ref) {
  const name = ref.split("/").pop();
  const link = make("a", name);
  link.href = `#${name}`;
  return link;
}

function joined(nodes, between) {
  const box = make("span");
  nodes.forEach((node, i) => box.append(...(i ? [between, node] : [node])));
  return box;
}

function kind(schema = {}) {
  if (schema.$ref) return named(schema.$ref);
  const options = schema.oneOf ?? schema.anyOf;
  if (options) return joined(options.map(kind), " or ");
  if (schema.enum) return joined(schema.enum.map((value) => make("code", JSON.stringify(value))), ", ");
  if ("const" in schema) return make("code", JSON.stringify(schema.const));
  if (schema.type === "array") return joined(["list of ", kind(schema.items)], "");
  return make("span", schema.type ?? "any");
}

const LIMITS = {
  minimum: "at least", maximum: "at most", minLength: "length at least", maxLength: "length at most",
  minItems: "items at least", maxItems: "items at most",
};

function limits(schema) {
  const all = [schema, ...(schema.anyOf ?? []), ...(schema.items ? [schema.items] : [])];
  const words = all.flatMap((part) => Object.entries(LIMITS)
    .filter(([name]) => name in part).map(([name, word]) => `${word} ${part[name]}`));
  if ("default" in schema && schema.default !== null) words.push(`default ${JSON.stringify(schema.default)}`);
  return words.join(", ");
}

function about(schema, description) {
  return prose("span", [description ?? schema.description ?? "", limits(schema)].filter(Boolean).join("; "));
}

function properties(schema) {
  const required = new Set(schema.required ?? []);
  return grid(["Field", "Type", ""], Object.entries(schema.properties ?? {}).map(([name, part]) =>
    [make("code", required.has(name) ? name : `${name}?`), kind(part), about(part)]));
}

function curl(method, path, operation) {
  const url = new URL(path.slice(1).replace("{id}", "ID"), location.href.replace(/docs.*$/, ""));
  if ((operation.parameters ?? []).some((parameter) => parameter.name === "q")) url.search = "q=red+running+shoes&k=5";
  const verb = method === "get" || operation.requestBody ? "" : ` -X ${method.toUpperCase()}`;
  return `curl -s${verb} '${url}'${body(operation)}`;
}

function body(operation) {
  const content = operation.requestBody?.content["application/json"];
  if (!content) return "";
  const text = JSON.stringify(example(content.schema)).replaceAll("'", "'\\''");
  return ` -H 'Content-Type: application/json' -d '${text}'`;
}

function example(schema) {
  const whole = schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
  const options = whole.oneOf ?? whole.anyOf;
  return whole.example ?? (options ? example(options[0]) : {});
}

function operationSection(path, method, operation) {
  const section = make("section");
  const title = make("h2");
  title.append(make("span", method.toUpperCase(), `method ${method}`), make("code", path), ` ${operation.summary ?? ""}`);
  section.append(title, prose("p", operation.description), make("pre", curl(method, path, operation)));
  if (operation.parameters?.length) {
    section.append(make("h3", "Parameters"), grid(["Name", "Type", ""], operation.parameters.map((parameter) => [
      make("code", parameter.required ? parameter.name : `${parameter.name}?`),
      kind(parameter.schema), about(parameter.schema, parameter.description),
    ])));
  }
  const body = operation.requestBody?.content;
  if (body) {
    const line = make("p");
    const [type, content] = Object.entries(body)[0];
    line.append(make("code", type), " ", kind(content.schema));
    section.append(make("h3", "Body"), line);
  }
  section.append(make("h3", "Answers"), grid(["Status", "", "Body"], Object.entries(operation.responses).map(
    ([status, response]) => {
      const content = Object.entries(response.content ?? {})[0];
      return [status, response.description, content ? joined([make("code", content[0]), kind(content[1].schema)], " ") : ""];
    })));
  return section;
}

function schemaSection(name, schema) {
  const section = make("section");
  section.id = name;
  section.append(make("h2", name), prose("p", schema.description), properties(schema));
  return section;
}

async function draw() {
  const api = await (await fetch("openapi.json")).json();
  schemas = api.components.schemas;
  document.getElementById("version").textContent = `${api.info.title} ${api.info.version}`;
  main.append(...api.info.description.trim().split("\n\n").map((text) => prose("p", text)));
  for (const [path, operations] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(operations)) main.append(operationSection(path, method, operation));
  }
  for (const [name, schema] of Object.entries(schemas)) main.append(schemaSection(name, schema));
  main.removeAttribute("aria-busy");
}

draw().catch(() => {
  main.replaceChildren(make("p", "The description of the API could not be loaded."));
  main.removeAttribute("aria-busy");
});
