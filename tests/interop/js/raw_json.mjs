// Reads JSON as text: members and items as the very characters they were written with.
// `JSON.parse` rounds big integers and keeps the last of two members of one name.

/** The members of an object, in order: [[name, raw value]], duplicates included. */
export function members(text) {
  const found = [];
  let at = open(text, "{");
  while (text[at] !== "}") {
    const nameEnd = skip(text, at);
    const name = JSON.parse(text.slice(at, nameEnd));
    at = expect(text, space(text, nameEnd), ":");
    const end = skip(text, at);
    found.push([name, text.slice(at, end)]);
    at = next(text, end, "}");
  }
  return found;
}

/** The items of an array, in order, raw. */
export function items(text) {
  const found = [];
  let at = open(text, "[");
  while (text[at] !== "]") {
    const end = skip(text, at);
    found.push(text.slice(at, end));
    at = next(text, end, "]");
  }
  return found;
}

/** The first member of this name, raw. */
export function member(text, name) {
  return members(text).find(([own]) => own === name)?.[1];
}

/** Where the value that starts at `at` ends. */
function skip(text, at) {
  if (text[at] === '"') {
    for (let end = at + 1; end < text.length; end++) {
      if (text[end] === "\\") end++;
      else if (text[end] === '"') return end + 1;
    }
    throw new Error("a string does not end");
  }
  if (text[at] === "{" || text[at] === "[") {
    for (let end = at, depth = 0; end < text.length; end++) {
      if (text[end] === '"') end = skip(text, end) - 1;
      else if (text[end] === "{" || text[end] === "[") depth++;
      else if ((text[end] === "}" || text[end] === "]") && --depth === 0) return end + 1;
    }
    throw new Error("an object or array does not end");
  }
  const end = text.slice(at).search(/[\s,\]}]/);
  return end < 0 ? text.length : at + end;
}

function space(text, at) {
  while (" \t\r\n".includes(text[at])) at++;
  return at;
}

function expect(text, at, character) {
  if (text[at] !== character) throw new Error(`expected ${character} at ${at}, found ${text[at]}`);
  return space(text, at + 1);
}

function open(text, bracket) {
  return expect(text, space(text, 0), bracket);
}

function next(text, at, end) {
  at = space(text, at);
  return text[at] === end ? at : expect(text, at, ",");
}
