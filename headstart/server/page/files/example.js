// Example messages for the chat: a table with a question, then further questions about it.

const PEOPLE = [["Anna Smith", 31], ["Ben Jones", 45], ["Carl Brown", 60], ["Dora White", 27],
  ["Emil Young", 52], ["Fay Green", 38], ["Gus Hill", 71], ["Hanna Moore", 19]];
const TABLE = PEOPLE.map(([name, age]) => `${name} is ${age} years old.`).join("\n");

// The example message after `numAsked` questions.
export function example(numAsked) {
  const [name] = PEOPLE[(3 * numAsked + 1) % PEOPLE.length];
  return `${numAsked ? "" : `${TABLE}\n`}How old is ${name}?`;
}
